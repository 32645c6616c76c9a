"""Random kills on a whole run, until a number of them is reached; then the same command must finish.

    python -m tests.soak [--kills 20] [--seed N] [--home FOLDER]

The run is `smoke` with the asynchronous loop and two rollout workers. Each kill takes, after a random time, either the
command (SIGKILL, SIGTERM or SIGINT) or one of its Ray actors (SIGKILL); a command that ended is started again. After
each that ended: no process of the home but the shared Prefect server's is left. At the end: the command finishes, no
process is left, no MLflow run is RUNNING, finished stages were never made again, and events.jsonl of every PPO stage
shows no rollout trained twice and none lost. Everything is printed, the seed first; exit code 1 where a rule is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from flows.experiment import load_experiment
from rl.events import read_events
from tasks.processes import ProcessId
from tasks.tracking import git_state
from tests.processes import processes_of
from tests.rl.event_rules import check_events

ROOT = Path(__file__).parents[1]
OVERRIDES = [
    "variants=base,compactionrl,no-summary-loss", "seeds=0,1", "critic_steps=12",
    "ppo.max_staleness=2", "ppo.steps=60", "ppo.batch_size=16",
    "loop.workers=2", "loop.slots=8", "loop.checkpoint_every=3", "evaluation.n_tasks=100",
]  # fmt: skip
ARGUMENTS = ["reproduce", "--preset", "smoke", *(part for o in OVERRIDES for part in ("--set", o)), "--json"]
DRIVER_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LONGEST_WAIT = 90.0
PATIENCE = 60.0
"""Seconds in which the processes of a command that ended must be gone"""
FINISH_SECONDS = 1_800.0


def log(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


class Soak:
    """One run, killed again and again."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.random = home, random.Random(seed)
        self.made: dict[str, str] = {}
        """Finished stage folder → its manifest's creation time"""
        self.output = home / "soak-output.log"

    def start(self) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "PREFECT_HOME", "RAY_ADDRESS")}
        command = [sys.executable, "-m", "flows.cli", *ARGUMENTS]
        with self.output.open("ab") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=kept | {"COMPACTIONRL_HOME": str(self.home)}, stdout=output, stderr=output
            )

    def kill_one(self, command: subprocess.Popen[bytes]) -> bool:
        """One kill after a random time. True where it hit; False where the command had ended by itself."""
        deadline = time.monotonic() + self.random.uniform(2.0, LONGEST_WAIT)
        while time.monotonic() < deadline:
            if command.poll() is not None:
                return False
            time.sleep(0.2)
        actors = [p for p in processes_of(self.home) if "ray::" in _name(p) and "Actor" in _name(p)]
        if actors and self.random.random() < 0.5:
            victim = self.random.choice(sorted(actors, key=lambda p: p.pid))
            log(f"kill -9 {_name(victim)}")
            victim.kill()
            return True
        number = self.random.choice(DRIVER_SIGNALS)
        log(f"kill -{number.name} the command")
        command.send_signal(number)
        code = command.wait(timeout=PATIENCE)
        expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        require(code in (expected, 0), f"the command ended with {code} after {number.name}, not {expected}")
        return True

    def wait_until_gone(self, *, server_may_stay: bool) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            left = [p for p in processes_of(self.home) if not (server_may_stay and self._is_server(p))]
            if not left:
                return
            time.sleep(0.5)
        raise AssertionError(f"still there: {[_name(p) for p in left]}")

    def _is_server(self, process: psutil.Process) -> bool:
        try:
            record = json.loads((self.home / "prefect" / "server.json").read_text())
        except OSError:
            return False
        server = ProcessId(**record["process"])
        family = {server.pid, *(child.pid for child in psutil.Process(server.pid).children(recursive=True))}
        return server.alive() and process.pid in family

    def check_stages(self) -> None:
        """What was finished stays as it was made."""
        for manifest in self.home.glob("stages/*/manifest.json"):
            created = json.loads(manifest.read_text())["created"]
            before = self.made.setdefault(manifest.parent.name, created)
            require(before == created, f"{manifest.parent.name} was finished and made again")

    def check_end(self) -> None:
        from mlflow import MlflowClient

        self.wait_until_gone(server_may_stay=False)
        client = MlflowClient(f"sqlite:///{self.home}/mlflow/mlflow.db")
        experiments = [e.experiment_id for e in client.search_experiments()]
        running = client.search_runs(experiments, "attributes.status = 'RUNNING'")
        require(not running, f"MLflow runs are still RUNNING: {[r.info.run_name for r in running]}")
        for run in client.search_runs(experiments, max_results=1_000):
            for name in run.data.metrics:
                steps = [m.step for m in client.get_metric_history(run.info.run_id, name)]
                require(len(steps) == len(set(steps)), f"MLflow run {run.info.run_name} has {name} twice at a step")
        experiment = load_experiment("smoke", OVERRIDES)
        for folder in sorted(self.home.glob("stages/*/events.jsonl")):
            steps = experiment.critic_steps if folder.parent.name.startswith("critic") else experiment.ppo.steps
            happened = check_events(read_events(folder), steps=steps, batch_size=experiment.ppo.batch_size)
            log(f"{folder.parent.name}: {happened}")


def require(condition: bool, why: str) -> None:
    if not condition:
        raise AssertionError(why)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:60] or process.name()
    except psutil.Error:
        return f"pid {process.pid}"


def soak(home: Path, kills: int, seed: int) -> None:
    run = Soak(home, seed)
    command = run.start()
    done = 0
    while done < kills:
        hit = run.kill_one(command)
        done += hit
        if command.poll() is not None:
            if not hit:  # an actor that dies too often for its stage ends the command as partly done
                require(command.returncode in (0, 3), f"the command ended by itself with {command.returncode}")
            run.wait_until_gone(server_may_stay=True)
            run.check_stages()
            log(f"{done} of {kills} kills, {len(run.made)} finished stages; starting the command again")
            require(command.returncode != 0, f"the run finished after {done} kills: make it longer")
            command = run.start()
    log("no more kills: the command must finish")
    if command.wait(timeout=FINISH_SECONDS) == 3:  # the last kills cost it a stage
        command = run.start()
    require(command.wait(timeout=FINISH_SECONDS) == 0, f"the last command ended with {command.returncode}")
    run.check_stages()
    run.check_end()
    log(f"all {kills} kills survived; {len(run.made)} stages")


def main() -> int:
    parser = argparse.ArgumentParser(description="Random kills on a whole run.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn and printed")
    parser.add_argument("--home", type=Path, default=None, help="default: a temporary folder")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    commit = git_state(ROOT).get("git_commit", "unknown")
    print(f"soak of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC at {commit}: seed {seed}, {arguments.kills} kills")
    with tempfile.TemporaryDirectory(prefix="crl-soak-") as folder:
        home = arguments.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        try:
            soak(home, arguments.kills, seed)
        except AssertionError as error:
            log(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
