"""An exception between any two bytecodes of a pass: the next pass is right, and nothing is left behind."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain import offload as room
from elastrain.offload import ActivationOffload, save_on_disk

ROOM = str(Path(room.__file__).parent)
_top = torch._C._autograd._top_saved_tensors_default_hooks


class Strike:
    """Counts the bytecodes of our own code in this thread, and raises at one of them: None only counts."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.count = 0

    def __enter__(self) -> Strike:
        sys.settrace(self._enters)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enters(self, frame: FrameType, event: str, value: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        frame.f_trace_opcodes = True
        return self._goes_on(frame, event, value)

    def _goes_on(self, frame: FrameType, event: str, value: object) -> Any:
        self.count += event in ("opcode", "call")
        if self.count - 1 == self.at:
            self.at = None
            raise KeyboardInterrupt
        return self._goes_on


class Step:
    """A model and its batch; one pass of it gives its gradients."""

    def __init__(self) -> None:
        torch.default_generator.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
        self.x = torch.randn(64, 64)

    def run(self, offload: ActivationOffload) -> list[Tensor]:
        with offload:
            loss = self.model(self.x).square().mean()
        loss.backward()
        return [each.grad for each in self.model.parameters() if each.grad is not None]


@pytest.fixture(params=[pytest.param(None, marks=pytest.mark.slow), 5 << 14], ids=["no limit", "a limit"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationOffload]:
    made = save_on_disk([tmp_path], min_bytes=1, memory_limit=request.param, deadline_s=20.0)
    yield made
    gc.collect()
    made.close()  # which ends what is being written
    stats = made.stats()
    assert (stats.live_bytes, [each.used_bytes for each in stats.devices]) == (0, [0])


def test_after_an_interrupt_anywhere_the_next_pass_is_right_and_nothing_is_left(offload: ActivationOffload) -> None:
    step = Step()
    expected = [each.clone() for each in step.run(offload)]
    step.model.zero_grad()
    with Strike(None) as counted:
        step.run(offload)
    assert counted.count > 1000
    for at in range(0, counted.count, 61):  # how many there are differs a little from run to run
        step.model.zero_grad()
        with suppress(KeyboardInterrupt), Strike(at):
            step.run(offload)
        step.model.zero_grad()
        assert not offload.entrance.is_entered
        assert _top(True) is None
        assert all(map(torch.equal, step.run(offload), expected)), at
