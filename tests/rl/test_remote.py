"""Seats: GPUs that actors of one stage claim together. Ray is told of GPUs that this machine need not have."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.processes import PATIENCE

SCRIPT = """
import asyncio, json, os, ray
from rl.errors import NotEnoughGpus
from rl.remote import actor, seated

class Seen:
    def gpus(self): return os.environ.get("CUDA_VISIBLE_DEVICES", "")

async def main():
    ray.init(address="local", num_cpus=1, num_gpus=GPUS, include_dashboard=False, log_to_driver=False)
    out = {}
    for name, wanted in WANTED.items():
        try:
            async with seated(wanted) as seats:
                actors = [actor(Seen, seat).remote() for seat in seats]
                out[name] = [await a.gpus.remote() for a in actors]
                for a in actors: ray.kill(a)
        except NotEnoughGpus as error:
            out[name] = str(error)
    async with seated([1.0]):
        waiting = asyncio.create_task(seated([float(GPUS)]).__aenter__())
        await asyncio.sleep(1)
        out["waits"] = not waiting.done()
    out["then"] = GPUS == 0 or len(await asyncio.wait_for(waiting, 300)) == 1
    print("\\n" + json.dumps(out))

asyncio.run(main())
"""


def seen(gpus: int, **wanted: list[float]) -> Any:
    """What actors seated with `wanted` GPUs see, in a Ray of their own."""
    script = textwrap.dedent(SCRIPT).replace("GPUS", str(gpus)).replace("WANTED", repr(wanted))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_actors_of_a_stage_get_their_gpus_together_and_the_next_stage_waits() -> None:
    out = seen(2, apart=[1.0, 1.0], shared=[0.5, 0.4], wide=[0.0, 2.0], many=[1.0, 2.0], none=[0.0, 0.0])
    assert sorted(out["apart"]) == ["0", "1"]
    assert len(set(out["shared"])) == 1, "both on one GPU"
    assert (out["wide"][0], sorted(out["wide"][1])) == ("", sorted("0,1"))
    assert "3 GPUs are needed (1 + 2), the cluster has 2: lower" in out["many"]
    assert out["none"] == ["", ""], "nothing is claimed where nothing is asked for"
    assert out["waits"]
    assert out["then"]
