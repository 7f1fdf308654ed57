"""Faults while a model trains within a limit: plain training's bits, or one sentence; nothing is left on the drive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from elastrain.offload.activations.hooks import OffloadConfig
from elastrain.offload.drives.posix import Calls, PosixEngine
from elastrain.offload.errors import OffloadError
from elastrain.offload.lifetimes import within as module
from tests.integration.offload.lifetimes.touching import begin, made, plain, tokens
from tests.support import warm
from tests.support.faulty_engines import ThrottledEngine
from tests.support.memory_engine import MemoryEngine

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 4
TIMEOUT_S = 240


def same(model: nn.Module) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(model.parameters(), plain(STEPS), strict=True))


def trained(engine: object, folder: Path, attempt: Callable[[nn.Module, int], None] | None = None) -> nn.Module:
    """After `STEPS` steps; `attempt` comes before each and may fail."""
    model, optimizer, limit_bytes = made()
    engines = None if engine is None else [engine]
    training = module.within(model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes, engines=engines)  # type: ignore[arg-type]
    for step in range(STEPS):
        if attempt is not None:
            attempt(model, step)
        model(tokens(step)).backward()
        training.step()
    training.close()
    return model


# Drives.


def test_short_writes_and_reads_are_gone_on_with(tmp_path: Path) -> None:
    moved = {"write": 0, "read": 0}

    def part(call: Callable[[int, Sequence[memoryview], int], int], name: str) -> Callable[..., int]:
        def move(fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
            moved[name] += 1
            return call(fd, [views[0][: max(4096, views[0].nbytes // 2 // 4096 * 4096)]], offset_bytes)

        return move

    calls = Calls(pwritev=part(os.pwritev, "write"), preadv=part(os.preadv, "read"))
    assert same(trained(PosixEngine(tmp_path, calls=calls), tmp_path))
    assert moved["write"] > 100 and moved["read"] > 100


def test_a_slow_drive_changes_no_bit(tmp_path: Path) -> None:
    assert same(trained(ThrottledEngine(MemoryEngine(), bytes_per_s=20e6), tmp_path))


class StandingStill(MemoryEngine):
    """A drive that takes everything and, from some read on, answers no more until it is let go."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self._left = reads

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        self._left -= 1
        if self._left < 0:
            self.go_on.wait(TIMEOUT_S)
        super().read(offset_bytes, views)


def test_a_drive_that_answers_no_more_ends_training_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OffloadConfig", partial(OffloadConfig, deadline_s=1.0))
    model, optimizer, limit_bytes = made()
    engine = StandingStill(reads=40)
    training = module.within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_bytes, engines=[engine])
    training._custody._deadline_s = 1.0

    def train() -> None:
        for step in range(STEPS):
            model(tokens(step)).backward()
            training.step()

    with pytest.raises(OffloadError, match=r"did not end within 1\.0 s"):
        train()
    engine.go_on.set()
    training.abandon()


def test_a_killed_process_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    code = """
import sys
from tests.integration.offload.lifetimes.touching import *
run = begin(sys.argv[1])
while True:
    run.model(tokens(0)).backward()
    run.step(UpdateOrder.BEFORE_FORWARD)
    if run.training.figures()["read_bytes"]:
        print("moves", flush=True)
"""
    process = warm.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "moves\n"
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    assert list(tmp_path.iterdir()) == []


# Programs.


def once(model: nn.Module, step: int, between: Callable[[], None]) -> None:
    loss = model(tokens(step))
    between()
    loss.backward()


def test_exceptions_in_forward_in_backward_and_between_cost_a_step_and_no_bit(tmp_path: Path) -> None:
    def attempt(model: nn.Module, step: int) -> None:
        block = list(model.modules())[step + 6]

        def fail(*_: object) -> None:
            raise RuntimeError("planned")

        for where in ("forward", "backward", "between"):
            handle = None
            if where == "forward":
                handle = block.register_forward_hook(fail)
            elif where == "backward":
                handle = block.register_full_backward_hook(fail)
            with pytest.raises(RuntimeError, match="planned"):
                once(model, step, fail if where == "between" else lambda: None)
            if handle is not None:
                handle.remove()
            model.zero_grad()

    assert same(trained(None, tmp_path, attempt))


def test_two_models_in_one_process_train_in_turns(tmp_path: Path) -> None:
    runs = [begin(str(tmp_path)), begin(str(tmp_path))]
    for step in range(STEPS):
        for run in runs:
            assert run.training is not None
            run.model(tokens(step)).backward()
        for run in runs:
            assert run.training is not None
            run.training.step()
    for run in runs:
        assert run.training is not None
        run.training.close()
        assert same(run.model)


def test_two_processes_use_one_directory_and_one_of_them_is_killed(tmp_path: Path) -> None:
    victim = warm.Popen(
        [sys.executable, "-c", "import sys\nfrom tests.integration.offload.lifetimes.touching import *\n"
         "run = begin(sys.argv[1])\nprint('begun', flush=True)\n"
         "while True:\n    run.model(tokens(0)).backward()\n    run.step(UpdateOrder.AFTER_BACKWARD)\n", str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert victim.stdout is not None and victim.stdout.readline() == "begun\n"

    def attempt(_model: nn.Module, step: int) -> None:
        if step == 1:
            victim.send_signal(signal.SIGKILL)
            victim.wait(TIMEOUT_S)

    assert same(trained(None, tmp_path, attempt))
    assert list(tmp_path.iterdir()) == []
