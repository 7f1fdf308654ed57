"""Every collective on small tensors with what is right beside what came, and a fuse that goes off inside of one.

A point is a call inside the communicator, counted in all threads of the victim: it does not matter how a collective is
carried out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from elastrain.comm.errors import CommError, MemberLost
from elastrain.comm.groups.group import Group

WRONG = "a wrong result"
NUMEL = 6000  # small enough to be quick, large enough for shared memory and for slices
Collective = Callable[[Group], list[tuple[torch.Tensor, torch.Tensor]]]  # what came, what is right


class _There(threading.local):
    """The device of a thread's tensors."""

    device = torch.device("cpu")


_THERE = _There()


def _given(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), float(rank + 1), device=_THERE.device)


def _empty() -> torch.Tensor:
    return torch.empty(NUMEL, device=_THERE.device)


def _all_reduce(group: Group, numel: int = NUMEL) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = _given(group.rank, numel)
    group.all_reduce(tensor).wait()
    return [(tensor, sum((_given(r, numel) for r in range(1, group.size)), _given(0, numel)))]


def _broadcast(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = _given(group.rank)
    group.broadcast(tensor, root=1).wait()
    return [(tensor, _given(1))]


def _all_gather(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outs = [_empty() for _ in range(group.size)]
    group.all_gather(outs, _given(group.rank)).wait()
    return [(out, _given(rank)) for rank, out in enumerate(outs)]


def _reduce_scatter(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    out = _empty()
    group.reduce_scatter(out, [_given(group.rank)] * group.size).wait()
    return [(out, sum((_given(r) for r in range(1, group.size)), _given(0)))]


def _all_to_all(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outs = [_empty() for _ in range(group.size)]
    group.all_to_all(outs, [_given(10 * group.rank + to) for to in range(group.size)]).wait()
    return [(out, _given(10 * rank + group.rank)) for rank, out in enumerate(outs)]


def _to_one_and_back(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine, out, reduced = _given(group.rank), _empty(), _given(group.rank)
    outs = [_empty() for _ in range(group.size)] if group.rank == 0 else None
    group.gather(outs, mine).wait()
    group.scatter(out, outs).wait()
    group.reduce(reduced, root=0).wait()
    total = sum((_given(r) for r in range(1, group.size)), _given(0))
    return [(out, mine), *([(reduced, total)] if group.rank == 0 else [])]


def _ring(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    left, out = (group.rank - 1) % group.size, _empty()
    group.send(_given(group.rank), (group.rank + 1) % group.size, tag=3)
    group.recv(out, left, tag=3).wait()
    return [(out, _given(left))]


def _barrier(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    group.barrier().wait()
    return []


COLLECTIVES: dict[str, Collective] = {
    "barrier": _barrier,
    "all_reduce of few": lambda group: _all_reduce(group, 4),
    "all_reduce": lambda group: _all_reduce(group, 20_000),
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather, scatter, reduce": _to_one_and_back,
    "ring of messages": _ring,
}


def run(name: str, group: Group, device: torch.device = _There.device) -> str:
    """ "" when all that came is right; else the lost member, the error, or that a result was wrong."""
    _THERE.device = device
    try:
        found = COLLECTIVES[name](group)
    except MemberLost as error:
        return error.member
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "" if all(torch.equal(came, right) for came, right in found) else WRONG


class Fuse:
    """Calls `act` at a given call inside the communicator, counted from `light` on. To be made before any thread."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.left = 0
        self._act = act
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def light(self, calls: int) -> None:
        self.left = calls

    def _on_event(self, frame: FrameType, event: str, _value: Any) -> None:
        if self.left and event == "call" and "/comm/" in frame.f_code.co_filename:
            self.left -= 1
            if not self.left:
                self._act()
