"""What holds for every sandbox of a task folder. Each kind runs these tests as its own."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from compaction.protocols import Environment, EnvironmentFailure, Execution, VerifierError
from evaluation.environments.sandbox import Sandbox
from evaluation.settings import SandboxSettings
from evaluation.tasksets.task_folder import HealthCheck
from tests.docker_engine import task_folder

DOCKERFILE = "FROM local/debian\nENV COLOUR=blue\nWORKDIR /app\nCOPY data /app/data\n"
PASSES = "echo 1 >/logs/verifier/reward.txt\n"
FILES = {
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/one.txt": "one\n",
    "tests/test.sh": PASSES,
}


class SandboxContract:
    kind: ClassVar[type[Sandbox]]
    place: Path

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path / "task"

    def sandbox(
        self, files: Mapping[str, str] = FILES, settings: Mapping[str, Any] | None = None, **task: Any
    ) -> Sandbox:
        folder = task_folder(self.place, {**FILES, **files}, **task)
        return self.kind(folder, SandboxSettings(**(settings or {})), self.place.parent / "evidence")

    def run(self, *commands: str, sandbox: Sandbox | None = None) -> list[Execution]:
        sandbox = sandbox or self.sandbox()

        async def all_of_them() -> list[Execution]:
            try:
                await sandbox.start()
                return [await sandbox.execute(command) for command in commands]
            finally:
                await sandbox.stop()

        return asyncio.run(all_of_them())

    def graded(self, sandbox: Sandbox, *commands: str) -> float:
        async def grade() -> float:
            try:
                await sandbox.start()
                for command in commands:
                    await sandbox.execute(command)
                return await sandbox.grade()
            finally:
                await sandbox.stop()

        return asyncio.run(grade())

    def error_of(self, sandbox: Sandbox, *commands: str) -> str:
        with pytest.raises(VerifierError) as raised:
            self.graded(sandbox, *commands)
        return raised.value.error_class

    # Commands

    def test_is_an_environment(self) -> None:
        assert isinstance(self.sandbox(), Environment)

    def test_starts_as_the_dockerfile_says(self) -> None:
        (execution,) = self.run("pwd; cat data/one.txt; echo $COLOUR")
        assert execution == Execution("/app\none\nblue\n")

    def test_folder_and_exported_variables_are_kept_between_commands(self) -> None:
        results = self.run(
            "mkdir -p 'a b'; cd 'a b'; export X='it'\"'\"'s\n$HOME' Y=2; hidden=1; unset COLOUR; exit 3",
            'pwd; echo "$X"; echo "$Y${hidden-}${COLOUR-}"; false',
            'cd ..; pwd; echo "$Y"\nif',
            "pwd",
        )
        assert [r.exit_code for r in results] == [3, 1, 2, 0]
        assert results[1].output == "/app/a b\nit's\n$HOME\n2\n"
        assert results[2].output.startswith("/app\n2\n")
        assert results[3].output == "/app\n"

    def test_a_folder_that_is_gone_is_told_of(self) -> None:
        _, gone, root = self.run("mkdir x; cd x; rmdir ../x", "pwd", "pwd")
        assert "/app/x" in gone.output
        assert gone.output.endswith("\n/\n")
        assert root.output == "/\n"

    def test_the_task_environment_is_on_top_of_the_image(self) -> None:
        (execution,) = self.run("echo $COLOUR", sandbox=self.sandbox(env={"COLOUR": "red"}))
        assert execution.output == "red\n"

    def test_errors_come_in_order_with_the_output_and_input_is_empty(self) -> None:
        (execution,) = self.run("echo a; echo b >&2; cat; set -x; echo c")
        assert execution.output.endswith("echo c\nc\n")
        assert execution.output.startswith("a\nb\n")

    def test_a_command_may_be_larger_than_an_argument(self) -> None:
        text = "x" * 300_000
        (execution,) = self.run(f"cat >big <<'END'\n{text}\nEND\nwc -c <big")
        assert execution.output.strip() == "300001"

    def test_a_killed_shell_leaves_the_session_as_it_was(self) -> None:
        _, killed, after = self.run("cd /tmp; export X=1", "cd /; export X=2; kill -9 $$", "pwd; echo $X")
        assert killed.exit_code == 137
        assert after.output == "/tmp\n1\n"

    def test_a_process_in_the_background_delays_nothing(self) -> None:
        began = time.monotonic()
        (execution,) = self.run("sleep 600 & echo started")
        assert execution.output == "started\n"
        assert time.monotonic() - began < 120

    # Time, memory, processes, disk

    def test_a_command_that_traps_every_signal_and_its_children_end_at_the_deadline(self) -> None:
        child = "trap '' TERM; while :; do date >>/app/beat; sleep 0.1; done"
        stubborn = f'trap "" TERM INT HUP; setsid sh -c "{child}" & while :; do sleep 1; done'
        sandbox = self.sandbox(settings={"command_timeout": 6})
        began = time.monotonic()
        count = "wc -l </app/beat"
        _, stopped, first, second = self.run(
            "cd data", stubborn, f"pwd; {count}", f"sleep 0.5; {count}", sandbox=sandbox
        )
        assert "stopped after 6 s" in stopped.note
        assert stopped.exit_code == 137
        assert first.output == "/app/data\n" + second.output
        assert time.monotonic() - began < 120

    def test_what_was_printed_before_the_deadline_is_shown(self) -> None:
        (execution,) = self.run("echo early; sleep 60", sandbox=self.sandbox(settings={"command_timeout": 6}))
        assert execution.output == "early\n"

    def test_a_cancelled_command_ends_and_the_sandbox_goes_on(self) -> None:
        sandbox = self.sandbox()

        async def cancelled() -> float:
            try:
                await sandbox.start()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await sandbox.execute("while :; do echo 0 >/logs/verifier/reward.txt; done")
                began = time.monotonic()
                assert await sandbox.grade() == 1
                return time.monotonic() - began
            finally:
                await sandbox.stop()

        assert asyncio.run(cancelled()) < 120

    def test_a_fork_bomb_stays_inside(self) -> None:
        sandbox = self.sandbox(settings={"pids": 64, "command_timeout": 5})
        *_, after = self.run("bomb() { bomb | bomb & }; bomb", "sleep 1; echo $?", "echo alive", sandbox=sandbox)
        assert after.output == "alive\n"

    def test_a_memory_hog_is_killed_and_the_note_says_why(self) -> None:
        hog = "exec python3 -c 'x = bytearray(1 << 30)'"
        killed, after = self.run(hog, "echo alive", sandbox=self.sandbox(memory_mb=64))
        assert killed.exit_code != 0
        assert "64 MiB" in killed.note or "MemoryError" in killed.output
        assert after.output == "alive\n"

    def test_a_file_has_a_largest_size(self) -> None:
        sandbox = self.sandbox(settings={"file_mb": 4})
        filled, size = self.run("head -c 100000000 /dev/zero >fill", "wc -c <fill", sandbox=sandbox)
        assert filled.exit_code != 0
        assert int(size.output) == 4 << 20

    def test_the_agent_has_no_dangerous_capability(self) -> None:
        (execution,) = self.run("grep CapEff /proc/self/status; grep NoNewPrivs /proc/self/status")
        capabilities = int(execution.output.split()[1], 16)
        assert capabilities & (1 << 21 | 1 << 12 | 1 << 13 | 1 << 27) == 0  # SYS_ADMIN, NET_ADMIN, NET_RAW, MKNOD
        assert execution.output.split()[3] == "1"

    def test_there_is_no_network_where_the_task_wants_none(self) -> None:
        reach = "python3 -c \"import socket; socket.create_connection(('10.255.255.1', 80), 5)\""
        (execution,) = self.run(reach, sandbox=self.sandbox(network="no-network"))
        assert "unreachable" in execution.output

    # Output

    def test_a_long_output_keeps_head_and_tail_and_names_the_cut(self) -> None:
        sandbox = self.sandbox(settings={"output_bytes": 1000})
        (execution,) = self.run("echo begin; head -c 199990 /dev/zero | tr '\\0' x; echo end", sandbox=sandbox)
        assert execution.output.startswith("begin\nxxx")
        assert execution.output.endswith("xxxend\n")
        assert "\n[… 199,000 bytes cut …]\n" in execution.output

    def test_200_mb_of_output_take_no_memory(self) -> None:
        sandbox = self.sandbox()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (execution,) = self.run("head -c 200000000 /dev/zero | tr '\\0' x", sandbox=sandbox)
        assert "[… 199,970,000 bytes cut …]" in execution.output
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000

    def test_a_line_of_200_kb_passes(self) -> None:
        sandbox = self.sandbox(settings={"output_bytes": 300_000})
        (execution,) = self.run("head -c 200000 /dev/zero | tr '\\0' y", sandbox=sandbox)
        assert execution.output == "y" * 200_000

    def test_bytes_that_are_not_utf8_show_as_replacements(self) -> None:
        (execution,) = self.run("printf 'a\\377\\000b\\303'")
        assert execution.output == "a\ufffd\0b\ufffd"

    # Files

    def test_files_and_folders_travel_both_ways(self, tmp_path: Path) -> None:
        local = tmp_path / "local"
        (local / "sub").mkdir(parents=True)
        (local / "sub" / "x.bin").write_bytes(b"\0\xff")
        sandbox = self.sandbox()

        async def travel() -> tuple[Execution, bytes]:
            try:
                await sandbox.start()
                await sandbox.upload("deep/er/file.txt", "é\n".encode())
                await sandbox.upload("/tmp/absolute", b"1")
                await sandbox.upload_folder(local, "/app/folder")
                seen = await sandbox.execute("cat deep/er/file.txt /tmp/absolute; ln -s /etc/passwd folder/link")
                await sandbox.download_folder("folder", tmp_path / "back")
                return seen, await sandbox.download("folder/sub/x.bin")
            finally:
                await sandbox.stop()

        seen, content = asyncio.run(travel())
        assert seen.output == "é\n1"
        assert content == b"\0\xff"
        assert [p.name for p in (tmp_path / "back").rglob("*")] == ["sub", "x.bin"]

    @pytest.mark.parametrize("path", ["/nowhere", "/app", "/app/link"])
    def test_what_is_no_plain_file_is_not_downloaded(self, path: str) -> None:
        sandbox = self.sandbox()

        async def download() -> None:
            try:
                await sandbox.start()
                await sandbox.execute("ln -s /etc/hostname /app/link; ln -s / /app/root")
                await sandbox.download(path)
            finally:
                await sandbox.stop()

        with pytest.raises(EnvironmentFailure, match=re.escape(path)):
            asyncio.run(download())

    def test_a_download_has_a_largest_size(self) -> None:
        sandbox = self.sandbox()

        async def download() -> None:
            try:
                await sandbox.start()
                await sandbox.execute("head -c 20000000 /dev/zero >large")
                await sandbox.download("large")
            finally:
                await sandbox.stop()

        with pytest.raises(EnvironmentFailure, match="20,000,000 bytes"):
            asyncio.run(download())

    # Grading

    def test_the_reward_is_what_the_tests_write(self) -> None:
        test = "pwd; echo $SECRET; cmp /tests/expected result && echo 0.5 >/logs/verifier/reward.txt\nexit 7"
        sandbox = self.sandbox({"tests/test.sh": test, "tests/expected": "done\n"}, verifier_env={"SECRET": "s3"})
        assert self.graded(sandbox, "cd /; export SECRET=agent; echo done >/app/result") == 0.5
        assert (self.place.parent / "evidence/verifier/test-stdout.txt").read_text() == "/app\ns3\n"
        assert (self.place.parent / "evidence/verifier/reward.txt").read_text() == "0.5\n"

    def test_reward_json_wins(self) -> None:
        test = 'echo 0 >/logs/verifier/reward.txt; echo \'{"reward": 0.25, "style": 1}\' >/logs/verifier/reward.json'
        assert self.graded(self.sandbox({"tests/test.sh": test})) == 0.25

    def test_a_forged_reward_and_forged_tests_are_removed(self) -> None:
        sandbox = self.sandbox({"tests/test.sh": "ls -A /tests; ls /logs/verifier; echo 0 >/logs/verifier/reward.txt"})
        forged = (
            "mkdir -p /tests /logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt; chmod 500 /logs/verifier; "
            "echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh; touch /tests/conftest.py /tests/.hidden"
        )
        assert self.graded(sandbox, forged) == 0
        seen = (self.place.parent / "evidence/verifier/test-stdout.txt").read_text()
        assert seen == "test.sh\ntest-stdout.txt\n"

    @pytest.mark.parametrize("linked", ["/tests", "/logs/verifier", "/logs"])
    def test_links_in_place_of_the_verifiers_folders_are_not_followed(self, linked: str) -> None:
        sandbox = self.sandbox({"tests/test.sh": "[ -e /app/trap/keep ] && echo 1 >/logs/verifier/reward.txt"})
        link = f"mkdir /app/trap; touch /app/trap/keep; rm -rf {linked}; ln -sT /app/trap {linked}; ls /app/trap"
        assert self.graded(sandbox, link) == 1

    def test_a_loop_in_the_background_cannot_write_the_reward(self) -> None:
        loop = (
            "(trap '' TERM; while :; do mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; sleep 0.01; done) "
            "</dev/null >/dev/null 2>&1 &"
        )
        sandbox = self.sandbox({"tests/test.sh": "echo 0 >/logs/verifier/reward.txt; sleep 0.5"})
        assert self.graded(sandbox, loop) == 0

    def test_tests_that_hang_are_ended(self) -> None:
        sandbox = self.sandbox({"tests/test.sh": "echo begun; trap '' TERM; sleep 600 & wait"}, verifier_timeout=6)
        began = time.monotonic()
        assert self.error_of(sandbox) == "verifier_timeout"
        assert time.monotonic() - began < 120
        assert (self.place.parent / "evidence/verifier/test-stdout.txt").read_text() == "begun\n"

    @pytest.mark.parametrize(
        ("test", "error_class"),
        [
            ("true", "reward_missing"),
            (": >/logs/verifier/reward.txt", "reward_empty"),
            ("echo nan >/logs/verifier/reward.txt", "reward_invalid"),
            ("head -c 10000000 /dev/zero >/logs/verifier/reward.txt", "reward_invalid"),
            ("ln -s /etc/passwd /logs/verifier/reward.txt; mkfifo /logs/verifier/reward.json", "reward_missing"),
            ("echo 'curl: (6) Could not resolve host: astral.sh'", "verifier_bootstrap"),
        ],
    )
    def test_no_reward_is_an_error_with_a_class(self, test: str, error_class: str) -> None:
        assert self.error_of(self.sandbox({"tests/test.sh": test})) == error_class

    def test_what_the_agent_leaves_in_logs_is_kept_as_evidence(self, caplog: pytest.LogCaptureFixture) -> None:
        leave = (
            "echo log >/logs/agent/run.log; mkdir /logs/artifacts/d; echo a >/logs/artifacts/d/a; "
            "head -c 20000000 /dev/zero >/logs/artifacts/large; ln -s /etc/passwd /logs/agent/link"
        )
        with caplog.at_level(logging.WARNING):
            assert self.graded(self.sandbox(), leave) == 1
        evidence = self.place.parent / "evidence"
        assert (evidence / "agent/run.log").read_text() == "log\n"
        assert (evidence / "artifacts/d/a").read_text() == "a\n"
        assert not (evidence / "artifacts/large").exists()
        assert not (evidence / "agent/link").is_symlink()
        assert "large" in caplog.text

    def test_the_tasks_own_solution_runs(self) -> None:
        files = {
            "solution/solve.sh": "cp /solution/answer /app/answer; echo $HINT",
            "solution/answer": "42",
            "tests/test.sh": "[ $(cat answer) = 42 ] && echo 1 >/logs/verifier/reward.txt",
        }
        sandbox = self.sandbox(files, solution_env={"HINT": "h"})

        async def solved() -> tuple[Execution, float]:
            try:
                await sandbox.start()
                return await sandbox.solve(), await sandbox.grade()
            finally:
                await sandbox.stop()

        assert asyncio.run(solved()) == (Execution("h\n"), 1.0)

    # Start and stop

    def test_a_health_check_is_waited_for(self) -> None:
        check = HealthCheck("echo x >>/tmp/tries; [ $(wc -l </tmp/tries) -ge 3 ]", interval=0.05, retries=3)
        (execution,) = self.run("wc -l </tmp/tries", sandbox=self.sandbox(healthcheck=check))
        assert execution.output.strip() == "3"

    def test_a_health_check_that_keeps_failing_ends_the_start(self) -> None:
        check = HealthCheck("echo not yet; exit 4", interval=0.05, retries=2)
        with pytest.raises(EnvironmentFailure, match="not yet") as raised:
            self.run(sandbox=self.sandbox(healthcheck=check))
        assert raised.value.error_class == "health_check"

    def test_a_workdir_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(EnvironmentFailure, match="/nowhere") as raised:
            self.run(sandbox=self.sandbox(workdir="/nowhere"))
        assert raised.value.error_class == "environment_start"

    def test_stop_may_come_at_any_time_and_twice(self) -> None:
        sandbox = self.sandbox()

        async def stop() -> None:
            await sandbox.stop()
            await sandbox.stop()

        asyncio.run(stop())
        with pytest.raises(EnvironmentFailure, match="start"):
            asyncio.run(sandbox.execute("true"))
