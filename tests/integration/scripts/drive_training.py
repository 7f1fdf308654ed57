"""Activations and, if asked for, optimizer shards on drives that go wrong when they are told to. Prints the digest.

A fault is told as MEMBER:PLACE:CALL:KIND:STEP, such as `m1:activations:read:flip:2`: the member's first call of that
kind at that place from the step on. `full`, `quota`, `gone` and `slow` last from then on; all others strike once.
"""

import argparse
import errno
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import elastrain
from elastrain.memory import held_shards as deciding
from elastrain.offload.activations import hooks, mover
from elastrain.offload.drives import device, residency
from elastrain.offload.drives.posix import Calls, PosixEngine
from elastrain.runtime.memory import spill_places

ME = os.environ.get("ELASTRAIN_MEMBER", "m0")
KEPT_BYTES = 3 << 20
"""Of six times a little more than half a MiB: most of it has to leave, however slow the drive is."""
LARGEST_BYTES = 512 * 256 * 4
SLOW_BYTES_PER_S = 30e6
NUMBERS = {"eio": errno.EIO, "full": errno.ENOSPC, "quota": errno.EDQUOT, "gone": errno.ENODEV}
LASTING = frozenset({"full", "quota", "gone", "slow"})
now = {"step": 0}


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 1024

    @functools.cache  # noqa: B019  the one data set of the process
    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


class Failing:
    """The kernel's calls on one file. `faults`: (call, kind, step from which it strikes)."""

    def __init__(self, faults: Sequence[tuple[str, str, int]]) -> None:
        self._left = list(faults)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        kind = self._struck("write", views)
        whole = sum(view.nbytes for view in views)
        if kind == "short":
            return whole - 100
        if kind == "torn":  # only the first page reaches the drive, which says nothing of it
            os.pwritev(fd, [views[0][:4096]], offset)
            return whole
        return os.pwritev(fd, views, offset)

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        kind = self._struck("read", views)
        moved = os.preadv(fd, views, offset)
        if kind == "short":
            return moved - 100
        if kind == "flip":
            views[0][views[0].nbytes // 2] ^= 1
        return moved

    def _struck(self, call: str, views: Sequence[memoryview]) -> str | None:
        due = next((each for each in self._left if each[0] in (call, "any") and each[2] <= now["step"]), None)
        if due is None:
            return None
        kind = due[1]
        if kind not in LASTING:
            self._left.remove(due)
        if kind in NUMBERS:
            raise OSError(NUMBERS[kind], os.strerror(NUMBERS[kind]))
        if kind == "slow":
            time.sleep(sum(view.nbytes for view in views) / SLOW_BYTES_PER_S)
        return kind


class SmallOffload(hooks.ActivationOffload):
    """`overlaps`: a forward that knows the largest storage waits for no more writes than the limit asks for."""

    # A runtime's backward begins before the forward is left, so that each of its forwards counts as the first one, in
    # which everything has to be on the drive before the next storage is saved: no write would be under way any more.
    overlaps = False

    def set_memory_limit(self, limit_bytes: int) -> None:
        super().set_memory_limit(min(limit_bytes, KEPT_BYTES))
        if self.overlaps:
            self._open()._limit.foresee(LARGEST_BYTES)


def arm(place: ModuleType, name: str, told: Sequence[str]) -> None:
    """Let the engines that `place` opens fail as told for this member."""
    faults = [each.split(":") for each in told]
    mine = [(call, kind, int(step)) for member, where, call, kind, step in faults if (member, where) == (ME, name)]
    if mine:
        failing = Failing(mine)
        calls = Calls(pwritev=failing.pwritev, preadv=failing.preadv)
        place.PosixEngine = lambda directory: PosixEngine(directory, calls=calls)  # type: ignore[attr-defined]


def die_in(told: Sequence[str]) -> None:
    """`told`: MEMBER:STATE:STEP: the member is killed when a saved storage enters the state, from the step on."""
    mine = [(residency.State(state), int(step)) for member, state, step in (e.split(":") for e in told) if member == ME]
    apply = mover.Mover.apply

    def apply_or_die(self: mover.Mover, record: Any, event: residency.Event) -> tuple[residency.Command, ...]:
        commands = apply(self, record, event)
        if any(record.state is state and now["step"] >= step for state, step in mine):
            os.kill(os.getpid(), signal.SIGKILL)
        return commands

    if mine:
        mover.Mover.apply = apply_or_die  # type: ignore[method-assign]
    SmallOffload.overlaps = any(state is residency.State.FORWARDED for state, _ in mine)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--run-length", type=int, default=2)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--faults", nargs="*", default=[], help="MEMBER:PLACE:CALL:KIND:STEP")
    parser.add_argument("--die-in", nargs="*", default=[], help="MEMBER:STATE:STEP")
    parser.add_argument("--idle-cores", type=float, help="as many are said to be idle: whether packing pays")
    parser.add_argument("--shards", action="store_true", help="all optimizer shards are on the drive")
    args = parser.parse_args()
    arm(hooks, "activations", args.faults)
    arm(spill_places, "shards", args.faults)
    die_in(args.die_in)
    if args.idle_cores is not None:
        device.IdleCores.look = lambda _: args.idle_cores  # type: ignore[method-assign]
    spill_places.ActivationOffload = SmallOffload  # type: ignore[misc]
    if args.shards:
        chosen = deciding.choose_shards
        deciding.choose_shards = lambda held, wanted_bytes: chosen(held, 1 << 60)
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, run_length=args.run_length, backups=args.backups)
    sizes = [64, *[256] * 6, 64]
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1)) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=args.micro_batches * 512, micro_batch_size=512)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        now["step"] = step.number
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
