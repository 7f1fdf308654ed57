"""Tests of this folder run in a process of their file that has the device; their arguments travel as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import warm

_processes: dict[str, subprocess.Popen[str]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    module = pyfuncitem.module.__name__
    process = _processes.get(module) or _started(module)
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"module": module, "name": pyfuncitem.function.__name__, "given": given}) + "\n")
    process.stdin.flush()
    if not (answer := process.stdout.readline()):
        del _processes[module]
        pytest.fail(f"the process ended with {process.wait()}", pytrace=False)
    if failure := json.loads(answer):
        pytest.fail(failure, pytrace=False)
    return True


def _started(module: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.contract.late.serving"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    _processes[module] = warm.Popen(command, env={**os.environ, **warm.THERE}, **pipes)
    return _processes[module]


@pytest.fixture(scope="module", autouse=True)
def process_of_module(request: pytest.FixtureRequest) -> object:
    yield
    process = _processes.pop(request.module.__name__, None)
    if process is not None and process.stdin is not None:
        process.stdin.close()
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
