"""From a new view to the survivors' first barrier: editing the groups in place, against rebuilding them.

`python -m experiments.comm_recovery.run [--quick] [--json]`. Which trials run and what is made of them; trials are in
`members`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments import torchft
from experiments.comm_recovery.members import WAYS, Trial, trial
from experiments.harness import ROOT, Reach, add_record_flag, interleave, quantile, record, report
from experiments.plots import lines

REACHES = {
    "edit_s": Reach(limit=0.01),
    "vs_full": Reach(limit=30, at_least=True),
    "vs_partial": Reach(limit=3.6, at_least=True),
    "vs_full_1000": Reach(limit=82, at_least=True),
}
WORLDS = (2, 4, 8, 16)
MAIN = 8
FAR = 1000
Found = Mapping[tuple[str, int], Sequence[Trial]]


def ways() -> tuple[str, ...]:
    """Those that can run here. A TorchFT that lies beside the environment is found by the processes forked later."""
    if torchft.is_here() and str(torchft.FOLDER) not in sys.path:
        sys.path.append(str(torchft.FOLDER))
    return tuple(name for name in WAYS if name != "torchft" or importlib.util.find_spec("torchft"))


def extrapolate(worlds: Sequence[int], used_s: Sequence[float], world: int, *, degree: int) -> float:
    """Processor seconds at `world`: a least-squares polynomial through what was measured, by numbers of survivors.

    Negative coefficients are set to zero and the rest is fitted again, so that nothing shrinks with size.
    """
    survivors = np.array(worlds, dtype=float) - 1
    powers = list(range(degree + 1))
    while True:
        columns = np.stack([survivors**power for power in powers], axis=1)
        fitted = np.linalg.lstsq(columns, np.array(used_s), rcond=None)[0]
        if (fitted >= 0).all():
            return float(sum(c * float(world - 1) ** power for c, power in zip(fitted, powers, strict=True)))
        powers.pop(int(np.argmin(fitted)))


def figures(found: Found) -> dict[str, Any]:
    """The keys of the README; None where there is nothing to divide."""
    wall = {case: quantile([one.wall_s for one in trials], 0.5) for case, trials in found.items()}
    busiest = {case: quantile([one.busiest_s for one in trials], 0.5) for case, trials in found.items()}
    values: dict[str, Any] = {"edit_s": wall["edit", MAIN]}
    for name in ("full", "partial", "torchft"):
        values[f"vs_{name}"] = wall[name, MAIN] / wall["edit", MAIN] if (name, MAIN) in wall else None
    if values["vs_torchft"] is None:
        values["torchft_reason"] = "not installed: python -m experiments.torchft fetches it"
    store = {case: quantile([one.store_s for one in trials], 0.5) for case, trials in found.items()}
    edit_far_s, full_far_s = _far_s(busiest, store, "edit"), _far_s(busiest, store, "full")
    values |= {"vs_full_1000": full_far_s / edit_far_s, "edit_1000_s": edit_far_s, "full_1000_s": full_far_s}
    values |= {f"{name}_{world}_s": seconds for (name, world), seconds in wall.items()}
    values |= {f"{name}_{world}_cpu_s": seconds for (name, world), seconds in busiest.items()}
    values |= {f"{name}_{world}_store_cpu_s": seconds for (name, world), seconds in store.items()}
    return values


def _far_s(busiest: Mapping[tuple[str, int], float], store: Mapping[tuple[str, int], float], name: str) -> float:
    """With a core for each process it takes at least as long as the busiest one: a member, whose links and messages
    grow with the members, or the store's, where every member asks for every other.
    """
    member_s = extrapolate(WORLDS, [busiest[name, world] for world in WORLDS], FAR, degree=1)
    return max(member_s, extrapolate(WORLDS, [store[name, world] for world in WORLDS], FAR, degree=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine (≤ 90 s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON only")
    add_record_flag(parser)
    args = parser.parse_args()
    rounds = 3 if args.quick else 9
    cases = {(name, world): partial(trial, name, world) for name, world in itertools.product(ways(), WORLDS)}
    named = interleave({f"{name} {world}": case for (name, world), case in cases.items()}, rounds=rounds)
    found = dict(zip(cases, named.values(), strict=True))
    values = figures(found)
    folder = ROOT / "experiments/comm_recovery/results"
    if args.record:
        record("comm_recovery", values, quick=args.quick, settings={"rounds": rounds, "worlds": WORLDS})
        series = {name: (WORLDS, [values[f"{name}_{world}_s"] * 1e3 for world in WORLDS]) for name in ways()}
        lines(folder / "recovery.png", series, labels=("processes", "ms"), title="New view → last survivor's barrier")
    if args.json:
        print(json.dumps(values))
        return 0
    met = report(values, REACHES)
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
