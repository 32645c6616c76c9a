"""The command as people meet it: help, plans, mistakes. Whole runs are in test_session.py and in the smoke test."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import compaction
from flows.cli import app
from flows.session import Request
from tasks.errors import UserError

HEAVY = ("torch", "ray", "prefect", "mlflow", "transformers", "pandas", "matplotlib", "scipy")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPACTIONRL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"TERM": "dumb", "COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["", "reproduce", "sweep", "report", "show", "compare", "doctor", "clean"])
def test_help_teaches(command: str) -> None:
    code, out, _ = invoke(*([command] if command else []), "--help")
    assert code == 0
    assert "compactionrl" in out


@pytest.mark.parametrize("command", ["reproduce", "sweep", "collect"])
def test_the_examples_of_a_help_can_be_run(command: str, home: Path) -> None:
    text = get_command(app).commands[command].help  # type: ignore[attr-defined]
    examples = [" ".join(part.split()) for part in text.split("\n\n") if part.strip().startswith("compactionrl ")]
    assert len(examples) > 2
    for example in examples:
        words = shlex.split(example.partition(" > ")[0].replace(" tasks/ ", " bench12 "))[1:]
        arguments = [word for word in words if word not in ("--dry-run", "--json")]
        code, out, err = invoke(*arguments, "--dry-run")
        assert code == 0, (example, err)
        assert "will run" in out


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from flows.cli import app
try:
    app(["reproduce", "--help"])
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["reproduce", "--preset", "tny"], "did you mean tiny?"),
        (["reproduce", "--set", "ppo.stpes=1"], "did you mean ppo.steps?"),
        (["reproduce", "--variants", "compactionlr"], "did you mean compactionrl?"),
        (["reproduce", "--seeds", "one"], "seeds.0 is 'one'"),
        (["reproduce", "--model", "./no/model"], "--model: there is no folder no/model"),
        (["reproduce", "--dataset", "./no/tasks"], "no/tasks"),
        (["reproduce", "--prompt-pack", "no-pack"], "prompt pack 'no-pack' is neither a file nor a shipped pack"),
        (["reproduce", "--env", "local"], "dataset.path is missing"),
        (["sweep", "--windows", "104,4096"], "a window of 4096 tokens is longer than the new model takes"),
        (["sweep", "--windows", "64q"], "evaluation.windows.0 is '64q'"),
        (["show"], "no runs in"),
        (["report", "abc"], "no runs in"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(home: Path, arguments: list[str], part: str) -> None:
    code, out, err = invoke(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert part in err
    assert "Traceback" not in err
    assert not home.exists()


def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(home: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"

    def refusal(described: str, *more: str) -> str:
        config.write_text(described)
        code, _, err = invoke("reproduce", "--model", str(tmp_path), *more)
        assert code == 2
        assert not home.exists()
        return err

    mixture = json.dumps({"model_type": "qwen3_moe", "max_position_embeddings": 4096})
    assert "'qwen3_moe' is not supported by the torch engine" in refusal(mixture)
    short = json.dumps({"model_type": "llama", "max_position_embeddings": 300})
    assert "the model takes 300 tokens, the longest window is 320" in refusal(short)
    assert "the longest window is 512" in refusal(short, "--set", "evaluation.windows=512")
    for unread in ("{", "[]"):
        assert "config.json cannot be read" in refusal(unread)
    nested = json.dumps({"model_type": "llama", "text_config": None, "max_position_embeddings": 300})
    assert "the longest window is 320" in refusal(nested)


def test_a_model_that_an_endpoint_stands_in_for_is_not_looked_at(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"extends: tiny\nsft: {{model: {tmp_path / 'gone'}}}\n")
    settings = ("engine=openai", "endpoint.base_url=http://127.0.0.1:9/v1", "endpoint.model=big")
    Request("sweep", str(preset), (*settings, "evaluation.dataset.path=bench12")).experiment()
    with pytest.raises(UserError, match="there is no folder"):
        Request("sweep", str(preset)).experiment()


def test_a_mistake_with_json_is_an_object(home: Path) -> None:
    code, out, err = invoke("reproduce", "--preset", "tny", "--json")
    assert code == 2
    assert json.loads(out) == {"status": "failed", "error": err.removeprefix("error: ").strip(), "exit_code": 2}


def test_an_unknown_option_is_refused() -> None:
    code, _, err = invoke("reproduce", "--presett", "tiny")
    assert code == 2
    assert "No such option" in err


def test_cleaning_nothing(home: Path) -> None:
    code, out, _ = invoke("clean")
    assert code == 0
    assert "nothing to clean" in out


def test_a_dry_run_lists_the_stages_with_why_and_writes_nothing(home: Path) -> None:
    code, out, err = invoke("reproduce", "--preset", "smoke", "--dry-run", "--json")
    assert code == 0, err
    stages = json.loads(out)["stages"]
    assert {stage["name"] for stage in stages} >= {"sft", "ppo", "evaluate"}
    assert all(not stage["cached"] and stage["why"] == "never run" for stage in stages)
    code, out, _ = invoke("reproduce", "--preset", "smoke", "--dry-run")
    assert code == 0
    assert "will run" in out
    assert not home.exists()


def planned(*arguments: str) -> dict[str, Any]:
    code, out, err = invoke("reproduce", "--preset", "smoke", *arguments, "--dry-run", "--json")
    assert code == 0, err
    experiment: dict[str, Any] = json.loads(out)["experiment"]
    return experiment


def test_a_dataset_is_trained_and_evaluated_on_in_one_kind_of_sandbox(home: Path) -> None:
    experiment = planned("--dataset", "bench12", "--env", "local")
    for dataset in (experiment["dataset"], experiment["evaluation"]["dataset"]):
        assert (dataset["path"], dataset["sandbox"]["kind"]) == ("bench12", "local")


def test_training_and_evaluation_are_set_apart_where_it_is_said(home: Path) -> None:
    apart = ["--set", "evaluation.dataset.limit=2", "--set", "evaluation.dataset.sandbox.kind=docker"]
    experiment = planned("--dataset", "bench12", "--env", "local", *apart)
    assert (experiment["dataset"]["limit"], experiment["evaluation"]["dataset"]["limit"]) == (None, 2)
    assert experiment["dataset"]["sandbox"]["kind"] == "local"
    assert experiment["evaluation"]["dataset"]["sandbox"]["kind"] == "docker"


def test_a_prompt_pack_of_ones_own_is_reproduced_with(home: Path, tmp_path: Path) -> None:
    pack = tmp_path / "mine.yaml"
    pack.write_text((Path(compaction.__file__).parent / "prompts" / "tiny.yaml").read_text())
    assert planned("--prompt-pack", str(pack))["agent"]["compaction"]["prompt_pack"] == str(pack)


def test_adapters_are_asked_for_by_settings_and_missed_before_anything_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--set", "trainer.lora.rank=8", "--set", "sft.sft.lora.targets=q_proj,v_proj"]
    experiment = planned(*arguments)
    assert experiment["trainer"]["lora"] == {"rank": 8, "alpha": 32.0, "targets": "all-linear"}
    assert experiment["sft"]["sft"]["lora"]["targets"] == ["q_proj", "v_proj"]
    monkeypatch.setitem(sys.modules, "peft", None)
    code, _, err = invoke("reproduce", "--preset", "smoke", *arguments)
    assert code == 2
    assert "pip install 'compactionrl[lora]'" in err
    assert not home.exists()


def test_a_sweep_plans_every_combination(home: Path) -> None:
    arguments = ["--caps", "0,1,2", "--keep-recent", "0,1", "--variants", "base", "--dry-run", "--json"]
    code, out, err = invoke("sweep", "--preset", "smoke", *arguments)
    assert code == 0, err
    assert len(json.loads(out)["cells"]) >= 1 + 2 * 2
