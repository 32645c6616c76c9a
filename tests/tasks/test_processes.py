from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from tasks.processes import ProcessId, stop_process

PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); input()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); input()"


def test_this_process_is_alive_and_one_of_its_number_is_not() -> None:
    me = ProcessId.current()
    assert me.alive()
    assert not replace(me, created=me.created - 1_000).alive()


def test_children_are_stopped_too() -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE)
    parent = psutil.Process(process.pid)
    while not (children := parent.children()):
        pass
    stop_process(ProcessId.of(process.pid))
    process.communicate()
    assert not any(child.is_running() for child in children)


def test_what_does_not_listen_is_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    identity = ProcessId.of(process.pid)
    stop_process(identity, patience=0.2)
    assert not identity.alive()
    process.communicate()


def test_a_process_that_is_gone_needs_no_stopping() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        identity = ProcessId.of(process.pid)
    except psutil.NoSuchProcess:
        pytest.fail("a child that was not waited for is still known")
    process.wait()
    assert not identity.alive()
    stop_process(identity)
