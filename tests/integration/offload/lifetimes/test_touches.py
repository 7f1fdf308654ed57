"""Who touches parameters, gradients or states from outside gets them as they are, or a sentence ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.offload.lifetimes.touching import CASES, OFTEN
from tests.support import warm

TIMEOUT_S = 240

BEGIN = """
import os, sys
from tests.integration.offload.lifetimes.touching import *
run = begin(sys.argv[1])
parameter = next(run.model.parameters())
def step():
    run.model(tokens(0)).backward()
    run.step(UpdateOrder.AFTER_BACKWARD)
for _ in range(3):
    step()
custody = run.training._custody
def send_all_away():
    custody.release(wholly=True)
    custody.clear()
send_all_away()
print("ready", flush=True)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return warm.run(
        [sys.executable, "-c", BEGIN + code, str(folder)], capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each in OFTEN else pytest.mark.on_demand) for each in CASES]
)
def test_what_programs_do_between_phases_works_as_in_plain_training(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.offload.lifetimes.touching", case, str(tmp_path)]
    done = warm.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "same\n" and done.returncode == 0, done.stderr


def test_whole_storages_are_copied_by_several_threads(tmp_path: Path) -> None:
    case = [sys.executable, "-m", "tests.integration.offload.lifetimes.touching", "after_step-copy_states"]
    done = warm.run([*case, str(tmp_path), "2"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "same\n" and done.returncode == 0, done.stderr


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == "ready\n" and done.returncode == 1, (done.stdout, done.returncode, done.stderr)
    assert done.stderr.count("\n") == 1 and "touched what is out of memory" in done.stderr, done.stderr
    return done.stderr


def test_what_a_drive_has_lost_is_said_to_who_touches_it(tmp_path: Path) -> None:
    code = "for each in run.training._devices: os.close(each.engine._fd)\nparameter.sum()\nprint('wrong')"
    assert "training cannot go on; start from a checkpoint" in said(run(code, tmp_path))


def test_gradients_that_a_step_has_used_are_gone(tmp_path: Path) -> None:
    code = "run.model(tokens(1)).backward()\nkept = parameter.grad\n"
    code += "run.step(UpdateOrder.AFTER_BACKWARD)\nkept.sum()\nprint('wrong')"
    assert "are gone, since step() has used them" in said(run(code, tmp_path))


def test_what_was_given_up_is_lost(tmp_path: Path) -> None:
    code = "run.training.abandon()\nparameter.sum()\nprint('wrong')"
    assert "close() brings everything back" in said(run(code, tmp_path))


def test_a_forked_process_has_none_of_it_and_is_told(tmp_path: Path) -> None:
    code = """
pid = os.fork()
if pid == 0:
    parameter.sum()
    print("wrong")
status = os.waitpid(pid, 0)[1]
parameter.sum()
os._exit(os.waitstatus_to_exitcode(status))
"""
    assert "in the memory of the process that this one was forked from" in said(run(code, tmp_path))


def test_whoever_else_crashes_crashes_as_ever(tmp_path: Path) -> None:
    done = run("import faulthandler\nfaulthandler.disable()\nimport ctypes\nctypes.string_at(8)", tmp_path)
    assert done.returncode == -11, (done.returncode, done.stderr)


def test_the_optimizers_own_step_is_refused(tmp_path: Path) -> None:
    done = run("run.optimizer.step()", tmp_path)
    assert "OffloadConfigError: optimizer.step() was called for a model in offload.within" in done.stderr
