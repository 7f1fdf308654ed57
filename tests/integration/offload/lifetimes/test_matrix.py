"""Each kind of piece × each state × each fault: plain training's bits or one sentence, and nothing left on the drive.

What forwards saved is computed again: who catches `SpillReadError` forgets the gradients and goes on, to the same bits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from elastrain.offload.errors import OffloadError, PieceLostError, SpillReadError
from elastrain.offload.lifetimes import within as module
from elastrain.offload.lifetimes.within import TrainingWithin
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from elastrain.offload.planning.plan_values import Kind
from tests.integration.offload.lifetimes.faulting import (
    KINDS,
    Drive,
    DriveFault,
    Where,
    drive_cells,
    striking,
)
from tests.integration.offload.lifetimes.touching import made, plain, tokens
from tests.support import warm

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 5
ARMED_AT = 3
"""By then there is a plan, and all kinds of pieces."""
TRIES = 3
TIMEOUT_S = 240
QUICK = {
    (Kind.PARAMETER, Where.ARRIVING, DriveFault.FLIP),
    (Kind.STATE, Where.OUT, DriveFault.FLIP),
    (Kind.GRADIENT, Where.LEAVING, DriveFault.EIO),
    (Kind.ACTIVATION, Where.ARRIVING, DriveFault.EIO),
    (Kind.ACTIVATION, Where.OUT, DriveFault.FLIP),
    (Kind.STATE, Where.LEAVING, DriveFault.GONE),
    (Kind.PARAMETER, Where.COPIED, DriveFault.FULL),
    (Kind.GRADIENT, Where.ARRIVING, DriveFault.SHORT),
}
HARMLESS = (DriveFault.SHORT, DriveFault.SLOW)


def micro_batch(model: nn.Module, step: int, act: Callable[[], None] = lambda: None) -> None:
    """One forward and backward, again where what it saved is lost."""
    for left in reversed(range(TRIES)):
        try:
            loss = model(tokens(step))
            act()
            loss.backward()
            return
        except SpillReadError:
            model.zero_grad()
            if not left:
                raise


def train(training: TrainingWithin, model: nn.Module, drive: Drive, order: UpdateOrder) -> None:
    for step in range(STEPS):
        drive.armed = step >= ARMED_AT
        micro_batch(model, step)
        training._planning.order = order
        training.step()


def outcome(drive: Drive, folder: Path, order: UpdateOrder, patch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """ "same", or the sentence that training ended with; and what it warned of. Fails where bits differ."""
    model, optimizer, limit_bytes = made()
    with striking(drive, patch), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        training = module.within(
            model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes, engines=[drive.engine(folder)],
            policy=Policy(recompute=False),
        )  # fmt: skip
        try:
            train(training, model, drive, order)
            training.close()
        except OffloadError as error:
            training.abandon()
            return f"{type(error).__name__}: {error}", [str(each.message) for each in told]
        assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), plain(STEPS), strict=True))
        return "same", [str(each.message) for each in told]


def named(*cell: Kind | Where | DriveFault) -> str:
    return "-".join(each.name.lower() for each in cell)


CELLS = [
    pytest.param(*cell, id=named(*cell), marks=[] if cell in QUICK else pytest.mark.on_demand) for cell in drive_cells()
]


@pytest.mark.parametrize(("kind", "where", "fault"), CELLS)
def test_a_drive_that_fails_costs_no_bit_and_is_not_silent(
    kind: Kind, where: Where, fault: DriveFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = []
    for order in UpdateOrder:
        drive = Drive(kind, where, fault)
        said, told = outcome(drive, tmp_path, order, monkeypatch)
        assert list(tmp_path.iterdir()) == []
        must_be_read = fault is DriveFault.FLIP and where not in (Where.COPIED, Where.HERE)  # those may stay copies
        struck.append((drive.read_back if must_be_read else drive.struck).is_set())
        if not drive.struck.is_set():
            assert said == "same"
            continue
        if fault in HARMLESS:
            assert said == "same", said
        elif fault is DriveFault.FLIP and (kind is Kind.ACTIVATION or not drive.read_back.is_set()):
            assert said == "same", said  # computed again; or written again, or given back, before anybody read it
        elif kind is Kind.ACTIVATION and fault is not DriveFault.GONE:
            # What was saved is computed again; what a drive does not take stays, where the limit has room for it.
            assert said == "same" or said.startswith(("SpillWriteError", "NoSpaceError")), said
        elif fault is DriveFault.FLIP or where is Where.ARRIVING:
            assert said.startswith(PieceLostError.__name__) or fault is DriveFault.GONE, said
        elif said == "same" and where not in (Where.OUT, Where.HERE):
            assert any(word in " ".join(told) for word in ("planned", "short")), told  # it went on, and said so
        assert "\n" not in said
    assert any(struck), "this never happens"


# Programs.

KILL = """
import os, signal, sys
from pathlib import Path
import pytest
from tests.integration.offload.lifetimes import test_matrix as matrix
from tests.integration.offload.lifetimes.faulting import Drive, Where
from tests.integration.offload.lifetimes.touching import small_memory
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_values import Kind
matrix.module.memory_for = small_memory
drive = Drive(Kind[sys.argv[2]], Where[sys.argv[3]], None, act=lambda: os.kill(os.getpid(), signal.SIGKILL))
for order in UpdateOrder:
    matrix.outcome(drive, Path(sys.argv[1]), order, pytest.MonkeyPatch())
"""
STATES = [
    pytest.param(kind, where, id=f"{kind.name.lower()}-{where.name.lower()}",
                 marks=[] if (kind, where) == (Kind.STATE, Where.ARRIVING) else pytest.mark.on_demand)
    for kind in KINDS for where in Where if (kind, where) != (Kind.ACTIVATION, Where.COPIED)
]  # fmt: skip


@pytest.mark.parametrize(("kind", "where"), STATES)
def test_sigkill_leaves_nothing_on_the_drive(kind: Kind, where: Where, tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-c", KILL, str(tmp_path), kind.name, where.name], stderr=subprocess.PIPE, timeout=TIMEOUT_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


class PlannedError(RuntimeError):
    """What a program raises."""


def fail(*_: object) -> None:
    raise PlannedError


def in_forward(model: nn.Module, step: int) -> None:
    handle = list(model.decoder)[1].register_forward_hook(fail)  # type: ignore[call-overload]
    with pytest.raises(PlannedError):
        model(tokens(step))
    handle.remove()


def in_backward(model: nn.Module, step: int) -> None:
    handle = list(model.decoder)[1].register_full_backward_hook(fail)  # type: ignore[call-overload]
    loss = model(tokens(step))
    with pytest.raises(PlannedError):
        loss.backward()
    handle.remove()
    model.zero_grad()


def between(model: nn.Module, step: int) -> None:
    model(tokens(step))


def forked(model: nn.Module, step: int) -> None:
    loss = model(tokens(step))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    loss.backward()
    model.zero_grad()


def touched(model: nn.Module, step: int) -> None:
    for each in model.parameters():
        float(each.detach().sum())


def beside(model: nn.Module, step: int, *, folder: Path) -> None:
    other, optimizer, limit_bytes = made()
    training = module.within(other, optimizer, dirs=[str(folder)], memory_limit=limit_bytes)
    other(tokens(step)).backward()
    training.step()
    training.close()


ACTS = [in_forward, in_backward, between, forked, touched, beside]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize(("kind", "where"), STATES)
def test_what_a_program_does_while_a_piece_moves_costs_no_bit(
    kind: Kind, where: Where, act: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive is slow with this kind in this state from the third step on, so that all that is done meets it."""
    drive = Drive(kind, where, DriveFault.SLOW)
    model, optimizer, limit_bytes = made()
    act = partial(act, folder=tmp_path) if act is beside else act
    with striking(drive, monkeypatch):
        training = module.within(
            model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_bytes, engines=[drive.engine(tmp_path)]
        )
        for step in range(STEPS):
            drive.armed = step >= ARMED_AT
            if drive.armed:
                act(model, step)
            micro_batch(model, step)
            training._planning.order = UpdateOrder.BEFORE_FORWARD
            training.step()
        training.close()
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), plain(STEPS), strict=True))
    assert list(tmp_path.iterdir()) == []
