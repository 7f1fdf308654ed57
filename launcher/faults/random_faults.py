"""Random faults for `elastrain chaos`, drawn from a seed: exponential gaps, random classes, random options.

A draw depends only on the seed and its number, so a run can be repeated whatever its job does. `aim` chooses the target
later, among the members that live at that moment. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastrain.errors import ConfigError
from elastrain.launcher.faults.fault import Fault, Moment, Scheme, Target, Value
from elastrain.launcher.faults.table import CLASSES, Carrier, FaultClass, Lasting, Option

DEFAULT = ("kill", "segfault", "abort", "exception", "device-error", "memory-limit", "stop", "slow", "hang")
"""Classes that every job survives, as long as its state and its restarts last."""
STEP_PHASES = frozenset({"forward", "backward", "reduce", "commit", "apply", "publish"})
"""Phases that occur in every step. A fault in a recovery phase would wait for another loss, and add to it."""
NODE_CLASSES = frozenset({"kill", "stop"})
"""Classes after which a simulated node comes back. A node that ends by itself stays away."""
FLIPS = ("parameters", "taken", "moments", "backup", "gradient", "partial")
"""Places of bit flips that exist in every job."""
_LASTING_S: Mapping[str, tuple[float, float]] = {
    "stop": (0.2, 8.0),
    "slow": (2.0, 15.0),
    "throttle": (2.0, 15.0),
    "drive": (0.2, 3.0),
    "flap": (0.2, 0.9),
    "partition": (1.0, 10.0),
    "loss": (2.0, 10.0),
    "slow-link": (2.0, 10.0),
    "etcd-kill": (1.0, 6.0),
    "etcd-stop": (1.0, 6.0),
    "etcd-wipe": (1.0, 3.0),
}
"""Class -> shortest and longest duration in seconds."""
_SPANS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("slow", "factor"): (1.5, 5.0),
    ("throttle", "share"): (0.1, 0.5),
    ("preempt", "grace"): (1.0, 10.0),
    ("loss", "percent"): (1.0, 15.0),
    ("slow-link", "rate"): (1.0, 50.0),
    ("drive", "rate"): (10.0, 200.0),
    ("device-error", "after"): (1.0, 200.0),
}
"""(class, option) -> lowest and highest value."""
_AT_A_PHASE, _AT_A_NODE = 0.5, 0.2
"""Fractions of the faults that strike at a phase, and that strike a whole node."""


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """The settings of the draws. A class that is named n times is drawn n times as often.

    `mean_s` is the mean time between two faults. `reckless` allows faults that may cost the state or the job.
    """

    seed: int
    mean_s: float
    classes: tuple[str, ...] = DEFAULT
    reckless: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.classes if name not in CLASSES]
        if unknown:
            raise ConfigError(f"--classes: unknown fault class {unknown[0]!r}: known are {', '.join(CLASSES)}")
        if not self.classes:
            raise ConfigError("--classes names no class")


def possible(plan: ChaosPlan, around: Collection[str]) -> tuple[ChaosPlan, str]:
    """Return the plan without classes that the job cannot carry out, and a sentence about those.

    `around` has the classes that the job's launcher can carry out. Raises ConfigError if no class is left.
    """
    missing = [name for name in plan.classes if CLASSES[name].by is Carrier.LAUNCHER and name not in around]
    if not missing:
        return plan, ""
    needs = "simulated nodes (--local-nodes N), and faults of the network nodes with networks of their own (--netns)"
    told = f"{', '.join(dict.fromkeys(missing))} cannot be carried out in this job: faults of etcd need {needs}"
    left = tuple(name for name in plan.classes if name not in missing)
    if not left:
        raise ConfigError(f"--classes: {told}")
    return replace(plan, classes=left), f"{told}; never drawn"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One random fault before its target is chosen. `pick` and `pick_scheme` are random numbers in 0..1."""

    number: int
    at_s: float
    """Seconds since the start of the chaos."""
    kind: str
    pick_scheme: float
    pick: float
    phase: str | None
    for_s: float | None
    options: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The living members and nodes.

    `homes` maps the members of the view, in order, to their nodes. `several` is True if the job has more than one node.
    """

    homes: Mapping[str, str]
    several: bool

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the members, in the order of the view."""
        return tuple(self.homes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with members, sorted."""
        return tuple(sorted(set(self.homes.values())))

    @staticmethod
    def of(state: Mapping[str, Any]) -> Situation:
        """Return the situation in the output of `elastrain status --json`."""
        inside = [each for each in state["members"] if each["rank"] is not None and each["state"] == "member"]
        return Situation(homes={each["id"]: each["node"] for each in inside}, several=len(state["nodes"]) > 1)


def draws(plan: ChaosPlan) -> Iterator[Draw]:
    """Yield draws without end, in order of time."""
    at_s, number = 0.0, 0
    while True:
        number += 1
        chance = random.Random(
            f"{plan.seed} {number}"
        )  # one generator per draw, so that draws do not influence each other
        at_s += chance.expovariate(1.0 / plan.mean_s)
        yield _draw(plan, chance, number, at_s)


def aim(draw: Draw, situation: Situation, plan: ChaosPlan) -> Fault | None:
    """Return the fault with its target, or None if there is no possible target."""
    scheme = _scheme(draw, situation, plan)
    names = _names(scheme, situation) if scheme is not None else []
    if scheme is None or not names:
        return None
    target = Target(scheme=scheme, name=names[int(draw.pick * len(names))])
    place = Moment(phase=draw.phase)
    return Fault(kind=draw.kind, targets=(target,), place=place, for_s=draw.for_s, options=draw.options)


def _draw(plan: ChaosPlan, chance: random.Random, number: int, at_s: float) -> Draw:
    row = CLASSES[chance.choice(plan.classes)]
    return Draw(
        number=number,
        at_s=at_s,
        kind=row.name,
        pick_scheme=chance.random(),
        pick=chance.random(),
        phase=_phase(row, plan, chance),
        for_s=_drawn(chance, *_LASTING_S[row.name]) if row.name in _LASTING_S else None,
        options=tuple((each.name, _value(row, each, plan, chance, number)) for each in row.options),
    )


def _phase(row: FaultClass, plan: ChaosPlan, chance: random.Random) -> str | None:
    # The launcher has no phases, and for a fault that lasts seconds the phase does not matter.
    phases = [phase for phase in row.phases if plan.reckless or phase in STEP_PHASES]
    wanted = chance.random() < _AT_A_PHASE and row.by is not Carrier.LAUNCHER and row.lasting is not Lasting.MUST
    return chance.choice(phases) if wanted and phases else None


def _value(row: FaultClass, option: Option, plan: ChaosPlan, chance: random.Random, number: int) -> Value:
    if isinstance(option.default, str):
        if len(option.choices) == 1:
            # A unique text: the same exception on a second member counts as an error of the script, and ends the job.
            return f"injected by chaos, number {number}"
        return chance.choice(FLIPS if row.name == "flip" and not plan.reckless else option.choices)
    span = _SPANS.get((row.name, option.name))
    if span is None:
        return option.default
    value = _drawn(chance, *span)
    return round(value) if option.is_whole else value


def _drawn(chance: random.Random, least: float, most: float) -> float:
    """Return a number whose logarithm is uniform, so that short and long durations are equally likely.

    Three digits are kept, for readability.
    """
    return float(f"{math.exp(chance.uniform(math.log(least), math.log(most))):.3g}")


def _scheme(draw: Draw, situation: Situation, plan: ChaosPlan) -> Scheme | None:
    row = CLASSES[draw.kind]
    possible = [scheme for scheme in row.targets if scheme is Scheme.MEMBER or situation.several]
    if Scheme.MEMBER in possible and Scheme.NODE in possible:
        to_node = draw.pick_scheme < _AT_A_NODE and (plan.reckless or draw.kind in NODE_CLASSES)
        return Scheme.NODE if to_node else Scheme.MEMBER
    return possible[int(draw.pick_scheme * len(possible))] if possible else None


def _names(scheme: Scheme, situation: Situation) -> list[str]:
    nodes = situation.nodes
    match scheme:
        case Scheme.MEMBER:
            return list(situation.members)
        case Scheme.NODE:
            return list(nodes)
        case Scheme.LINK:
            return [f"{one}-{other}" for index, one in enumerate(nodes) for other in nodes[index + 1 :]]
        case Scheme.ETCD:
            return [""]
