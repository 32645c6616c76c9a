"""Task folders in bubblewrap sandboxes on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from compaction.protocols import EnvironmentFailure
from evaluation.environments.bubblewrap import LocalEnvironment, reap_dead_folders
from tests.evaluation.environments.sandbox_contract import SandboxContract

pytestmark = [
    pytest.mark.xdist_group("bubblewrap"),
    pytest.mark.skipif(sys.platform == "linux" and shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]
if sys.platform != "linux":
    pytestmark += [pytest.mark.may_skip, pytest.mark.skip(reason="bubblewrap needs Linux")]


class TestLocal(SandboxContract):
    kind = LocalEnvironment

    def test_the_machine_is_read_only_and_its_homes_are_hidden(self) -> None:
        probe = (
            "for d in / /usr /etc /opt /proc/sys; do touch $d/x 2>/dev/null && echo wrote $d; done; "
            "ls -d /home /srv /var /mnt; ls /root; cat /etc/shadow; ls /etc/ssl/private"
        )
        (execution,) = self.run(probe)
        assert "wrote" not in execution.output
        for path in ("/home", "/srv", "/var", "/mnt", "/etc/shadow", "/etc/ssl/private"):
            assert f"{path}: No such file" in execution.output or f"{path}': No such file" in execution.output

    def test_the_running_python_has_its_packages(self) -> None:
        (execution,) = self.run(
            "python3 -c 'import numpy, sys; print(sys.prefix)'; echo $HOME; touch $HOME/x && id -un"
        )
        assert execution.output == f"{sys.prefix}\n/agent\nroot\n"

    def test_nothing_of_the_drivers_environment_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("API_KEY_OF_USER", "secret")
        first, second = self.run("env; cat /proc/1/environ", "env")
        assert "secret" not in first.output + second.output

    def test_servers_on_loopback_work(self) -> None:
        serve = "python3 -m http.server 8000 >/dev/null 2>&1 & "
        get = "python3 -c \"import urllib.request as u; print(u.urlopen('http://localhost:8000/data/one.txt').read())\""
        (execution,) = self.run(f"{serve} until {get} 2>/dev/null; do sleep 0.1; done")
        assert execution.output == "b'one\\n'\n"

    def test_processes_in_the_background_end_with_their_command(self) -> None:
        _, left = self.run("sleep 50 & sleep 50 &", "ps -e | grep -c sleep")
        assert left.output == "0\n"

    def test_the_folder_is_gone_after_stop_even_without_permissions(self) -> None:
        before = set(Path(tempfile.gettempdir()).glob("compactionrl-local.*"))
        self.run("mkdir -p a/b; touch a/b/c; chmod 000 a/b a")
        assert set(Path(tempfile.gettempdir()).glob("compactionrl-local.*")) <= before

    def test_a_full_disk_stops_the_command(self) -> None:
        fill = "i=0; while :; do head -c 4000000 /dev/zero >f$i; i=$((i + 1)); sleep 0.1; done"
        full, after = self.run(fill, "rm f*; echo $?", sandbox=self.sandbox(storage_mb=20))
        assert "over 20 MiB on disk" in full.note
        assert after.output == "0\n"

    @pytest.mark.parametrize(
        ("line", "named"),
        [
            ("RUN apt-get install -y gcc", "RUN"),
            ("ADD data /app", "ADD"),
            ("FROM y", "a second FROM"),
            ("COPY <<END /app/file\nEND", "<<END"),
            ("USER nobody", "USER"),
            ("COPY --from=other /x /y", "--from"),
            ("COPY data/* /app/", "data/\\*"),
            ("COPY ../outside /app", "outside"),
            ("COPY missing /app", "missing"),
            ("COPY data /usr/share", "/usr/share"),
        ],
    )
    def test_what_needs_an_image_is_refused_by_name(self, line: str, named: str) -> None:
        sandbox = self.sandbox({"environment/Dockerfile": f"FROM x\n{line}\n"})
        with pytest.raises(EnvironmentFailure, match=f"(?s){named}.*--env docker") as raised:
            self.run(sandbox=sandbox)
        assert raised.value.error_class == "environment_start"

    @pytest.mark.parametrize(
        ("setting", "value"), [("docker_image", "python:3"), ("agent_user", "nobody"), ("verifier_user", "tester")]
    )
    def test_images_and_other_users_are_refused(self, setting: str, value: str) -> None:
        with pytest.raises(EnvironmentFailure, match=f"{value}.*--env docker"):
            self.run(sandbox=self.sandbox(**{setting: value}))

    def test_the_dockerfiles_forms_are_understood(self) -> None:
        dockerfile = (
            '# syntax=docker/dockerfile:1\nFROM x AS base\nENV A=1 B="two words" \\\n  C=$A$B\nENV D an old form\n'
            'WORKDIR /work-place\nWORKDIR sub\nCOPY data/one.txt renamed\nCOPY ["data", "/data dir/"]\n'
            "COPY data/one.txt data/two.txt ./both/\n"
        )
        files = {"environment/Dockerfile": dockerfile, "environment/data/two.txt": "2"}
        (execution,) = self.run(
            'pwd; echo "$A|$B|$C|$D"; cat renamed "/data dir/two.txt"; ls both', sandbox=self.sandbox(files)
        )
        assert execution.output == "/work-place/sub\n1|two words|1two words|an old form\none\n2one.txt\ntwo.txt\n"

    def test_a_start_without_bubblewrap_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(EnvironmentFailure, match=r"install bubblewrap.*--env docker") as raised:
            self.run(sandbox=self.sandbox())
        assert raised.value.error_class == "environment_start"

    def test_what_a_killed_driver_leaves_is_removed_at_the_next_start(self, tmp_path: Path) -> None:
        self.sandbox()
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.evaluation.environments.driver", "local", str(self.place)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "running\n"
        (left,) = tmp_path.glob("compactionrl-local.*")
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.stdout.close()
        tempfile.tempdir = str(tmp_path)
        try:
            reap_dead_folders()
        finally:
            tempfile.tempdir = None
        assert not left.exists()
