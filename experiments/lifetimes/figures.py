"""Measures training within a limit against plain training and other policies: processes of their own, in turns."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from elastrain.offload.planning.move_plan import make_plan
from elastrain.offload.planning.plan_values import Budget, Tier
from elastrain.offload.planning.program import gaps, least_bytes, needs
from experiments.harness import Reach, add_record_flag, interleave, record, report
from experiments.lifetimes.device import main as on_a_device
from experiments.lifetimes.recorded import measure_recorder
from experiments.lifetimes.worker import Case, Worker
from experiments.offload.models import KINDS, Shape
from experiments.offload.processes import Process, apart
from tests.support.programs import blocks

REACHES = {
    "bits_equal": Reach(limit=1, at_least=True),
    "peak_to_limit": Reach(limit=1.0),
    "ideal_50": Reach(limit=0.95, at_least=True),
    "ideal_25": Reach(limit=0.90, at_least=True),
    "vs_zero_policy": Reach(limit=1.47, at_least=True),
    "vs_demand": Reach(limit=1.3, at_least=True),
    "share_of_possible": Reach(limit=0.93, at_least=True),
    "share_of_possible_demand": Reach(limit=0.93, at_least=True),
    "model_error": Reach(limit=0.10),
    "written_error": Reach(limit=0.02),
    "two_drives": Reach(limit=1.6, at_least=True),
    "host_tier": Reach(limit=1.15, at_least=True),
    "plan_s": Reach(limit=1.0),
    "record_price": Reach(limit=1.15),
}
WARM_STEPS = 6
"""Two show what there is to plan, one more has updates in the plan's order, one is watched; then freed memory stays."""
SLOW_BYTES_PER_S = 0.5e9
RATES = (0.25e9, 0.5e9, 1e9, 2e9, 4e9)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured. Limits are shares of the peak of plain training."""

    shape: Shape
    kinds: tuple[str, ...]
    shares: tuple[float, ...]
    rounds: int
    slow: bool
    curve: bool
    plan_blocks: int = 770


SMALL = Shape(width=384, layers=8, tokens=128, batch=4, vocabulary=4096)
QUICK = Size(shape=SMALL, kinds=("gpt",), shares=(0.5, 0.25), rounds=3, slow=False, curve=False)
FULL = Size(
    shape=replace(SMALL, width=512, batch=8), kinds=KINDS, shares=(0.75, 0.5, 0.25), rounds=5, slow=True, curve=True
)


class Group:
    """Processes that take turns, by name. `plain` is there always; digests are taken after equal numbers of steps."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        self._processes = {name: Process(Worker, case) for name, case in cases.items()}

    def ask(self, what: str) -> dict[str, Any]:
        """What each answers."""
        return {name: each.ask(what) for name, each in self._processes.items()}

    def turns(self, rounds: int) -> dict[str, list[dict[str, float]]]:
        """So many steps of each, in turns."""
        return interleave({name: lambda p=each: p.ask("step") for name, each in self._processes.items()}, rounds=rounds)  # type: ignore[misc]

    def close(self) -> None:
        """End them."""
        for each in self._processes.values():
            each.close()


def peak_of_plain(kind: str, shape: Shape, directory: Path) -> int:
    """The kernel's peak of plain training: what limits are shares of."""
    process = Process(Worker, Case(way="plain", kind=kind, shape=shape, directory=directory))
    for _ in range(3):
        process.ask("step")
    found: int = process.ask("peak_bytes")
    process.close()
    return found


def measure_group(cases: Mapping[str, Case], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each: its steps in turns, its digest, its peak, and what its plan said."""
    group = Group(cases)
    try:
        group.turns(WARM_STEPS)
        before = group.ask("figures")
        turns = group.turns(rounds)
        after, peaks, digests = group.ask("figures"), group.ask("peak_bytes"), group.ask("digest")
    finally:
        group.close()
    return {
        name: {
            "wall_s": [each["wall_s"] for each in turns[name]],
            "thread_s": [each["thread_s"] for each in turns[name]],
            "predicted_s": [each.get("predicted_s", 0.0) for each in turns[name]],
            "predicted_written_bytes": [each.get("predicted_written_bytes", 0) for each in turns[name]],
            "peak_bytes": peaks[name],
            "limit_bytes": cases[name].limit_bytes,
            "digest": digests[name],
            "plan": after[name],
            "written_bytes": _per_step(before[name], after[name], "written_bytes", rounds),
        }
        for name in cases
    }


def _per_step(before: Mapping[str, Any], after: Mapping[str, Any], name: str, rounds: int) -> float:
    return float(after.get(name, 0) - before.get(name, 0)) / rounds


def speed(found: Mapping[str, Mapping[str, Any]], ours: str, other: str) -> float:
    """The other's step time over ours: the median over rounds, in each of which both had a turn."""
    pairs = zip(found[other]["wall_s"], found[ours]["wall_s"], strict=True)
    return statistics.median(theirs / mine for theirs, mine in pairs)


def measure_kind(kind: str, size: Size, directory: Path, bytes_per_s: float | None) -> dict[str, dict[str, Any]]:
    """Plain, ours at each limit, ZeRO-Infinity's policy and no plan."""
    plain = Case(way="plain", kind=kind, shape=size.shape, directory=directory, bytes_per_s=bytes_per_s)
    top_bytes = peak_of_plain(kind, size.shape, directory)
    cases = {"plain": plain}
    for share in size.shares:
        cases[f"ours {share}"] = replace(plain, way="ours", limit_bytes=int(share * top_bytes))
    for way in ("zero", "demand"):
        cases[way] = replace(plain, way=way, limit_bytes=int(min(size.shares) * top_bytes))
    found = measure_group(cases, size.rounds)
    found["plain"]["limit_bytes"] = top_bytes
    return found


def summary(kinds: Mapping[str, Mapping[str, Any]], slow: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The keys, worst over the models."""
    both = [*kinds.values(), *slow.values()]
    ours = [(each, name) for each in both for name in each if name.startswith("ours")]
    plans = [each[name] for each, name in ours]
    ratios = [speed(each, name, "zero") for each, name in ours]
    figures = {
        "bits_equal": float(all(one["digest"] == each["plain"]["digest"] for each in both for one in each.values())),
        "peak_to_limit": max(each["peak_bytes"] / each["limit_bytes"] for each in plans),
        "vs_zero_policy": math.exp(statistics.fmean(map(math.log, ratios))),
        "model_error": max(
            _error(statistics.median(each["predicted_s"]), statistics.median(each["wall_s"])) for each in plans
        ),
        "written_error": max(
            _error(statistics.fmean(each["predicted_written_bytes"]), each["written_bytes"]) for each in plans
        ),
    }
    for share, name in ((0.5, "ideal_50"), (0.25, "ideal_25")):
        of = [speed(each, f"ours {share}", "plain") for each in kinds.values() if f"ours {share}" in each]
        cores = [_thread(each, f"ours {share}") for each in kinds.values() if f"ours {share}" in each]
        figures |= {name: min(of), f"{name}_by_processor_time": min(cores)}
    figures["vs_demand"] = min(speed(each, "ours 0.25", "demand") for each in kinds.values())
    wanted = {name: REACHES[name].limit for name in ("vs_zero_policy", "vs_demand")}
    figures["share_of_possible"] = min(
        share_of_possible(each, name, "zero", wanted["vs_zero_policy"]) for each, name in ours
    )
    figures["share_of_possible_demand"] = min(
        share_of_possible(each, "ours 0.25", "demand", wanted["vs_demand"]) for each in kinds.values()
    )
    return figures


def share_of_possible(found: Mapping[str, Mapping[str, Any]], ours: str, other: str, wanted: float) -> float:
    """Return how many times as fast as `other` ours is, as a share of what is wanted, or of what is possible if less.

    Nothing is faster than plain training, so ours can be at most plain's speed over the other's.
    """
    return speed(found, ours, other) / min(wanted, speed(found, "plain", other))


def _thread(found: Mapping[str, Mapping[str, Any]], ours: str) -> float:
    """The same by processor seconds of the training thread, which other programs disturb less; waits are left out."""
    return statistics.median(found["plain"]["thread_s"]) / statistics.median(found[ours]["thread_s"])


def _error(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured if measured else float(predicted > 0)


def measure_drives(size: Size, directory: Path) -> dict[str, float]:
    """GPT at 25 %: one slow drive against two of them, and against one with a tenth of the need in host memory."""
    top_bytes = peak_of_plain("gpt", size.shape, directory)
    one = Case(
        way="ours",
        kind="gpt",
        shape=size.shape,
        directory=directory,
        limit_bytes=top_bytes // 4,
        bytes_per_s=SLOW_BYTES_PER_S / 2,
    )
    cases = {"one": one, "two": replace(one, drives=2), "host": replace(one, host_bytes=top_bytes // 10)}
    found = measure_group(cases, size.rounds)
    return {
        "two_drives": 1 / speed(found, "one", "two"),
        "host_tier": 1 / speed(found, "one", "host"),
    }


def measure_curve(size: Size, directory: Path) -> dict[str, list[float]]:
    """Speed of ideal over the drive's rate: ours at 50 and 25 %, and ZeRO-Infinity's policy."""
    found: dict[str, list[float]] = {"rate_bytes_per_s": list(RATES)}
    for rate in RATES:
        one = measure_kind("gpt", replace(size, shares=(0.5, 0.25), rounds=3), directory, rate)
        for name in one:
            found.setdefault(name, []).append(speed(one, name, "plain"))
    return found


def measure_plan(count: int) -> dict[str, float]:
    """Processor seconds for the plan of about 10,000 gaps, at half of what the step needs."""
    program = blocks(count)
    limit_bytes = max(max(needs(program)) // 2, least_bytes(program)[0])
    tier = Tier(name="drive", read_bytes_per_s=6.5e9, write_bytes_per_s=3.5e9)
    seconds = []
    for _ in range(3):
        began_s = time.process_time()
        make_plan(program, Budget(limit_bytes=limit_bytes, tiers=(tier,)))
        seconds.append(time.process_time() - began_s)
    return {"plan_s": min(seconds), "plan_gaps": float(len(gaps(program)))}


def measure(size: Size, directory: Path) -> dict[str, Any]:
    """All figures."""
    kinds = {kind: measure_kind(kind, size, directory, None) for kind in size.kinds}
    slow = {kind: measure_kind(kind, size, directory, SLOW_BYTES_PER_S) for kind in size.kinds} if size.slow else {}
    figures = summary(kinds, slow)
    if size.slow:
        figures |= measure_drives(size, directory)
    figures |= apart(measure_plan, size.plan_blocks)
    figures |= apart(measure_recorder, size.shape)
    found: dict[str, Any] = {**figures, "kinds": kinds, "slow": slow}
    if size.curve:
        found["curve"] = measure_curve(size, directory)
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.lifetimes.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small model, about a minute and a half")
    parser.add_argument("--dir", default=None, help="a directory on the SSD (default: the temporary directory)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models are")
    parser.add_argument("--curve", action="store_true", help="only speed over the drive's rate, with the quick model")
    add_record_flag(parser)
    args = parser.parse_args(given)
    if args.device == "cuda":
        measure_on_a_device()
        return
    size = QUICK if args.quick or args.curve else FULL
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        figures = {"curve": measure_curve(size, Path(name))} if args.curve else measure(size, Path(name))
    if args.record:
        record("lifetimes", figures, quick=size is QUICK, settings=asdict(size))
    report(figures, {name: reach for name, reach in REACHES.items() if name in figures})


def measure_on_a_device() -> None:
    """The ways of `device.py`, with its defaults. Ends with one sentence where there is no device."""
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device on this machine; leave the flag out, or go to one")
    on_a_device([])
