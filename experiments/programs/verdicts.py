"""Says what a program's runs come to: equal, refused, wrong or stuck, with the reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.programs.program import Program
from experiments.programs.ways import WORLDS, Ran

EQUAL, REFUSED, WRONG, STUCK = "equal", "refused", "wrong", "stuck"
WORST_FIRST = (STUCK, WRONG, REFUSED, EQUAL)
CLOSE = 1e-4
MEMBERS = {"one": 1, "2": 2, "3": 3, "kill": 1, "resume": 1, "stages": 1}
"""Way -> how many members must have said a digest at least."""
MAY_BE_REFUSED = ("stages",)
"""A model or loop without legal cuts is an ordinary one."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one way of a program came to, and why."""

    kind: str
    why: str = ""
    faults: str = ""


def judge(program: type[Program], way: str, ran: Ran, others: Mapping[str, Ran]) -> Verdict:
    """Judge a way. `others` has the plain run and the job of one, with which it is compared."""
    if ran.code is None:
        kind, why = STUCK, f"still running at its deadline\n{ran.end}"
    elif ran.code != 0:
        kind, why = _of_a_failure(program, way, ran)
    else:
        why = _differs_in_bits(ran, others["plain"]) if way in WORLDS else _differs(way, ran, others)
        kind = WRONG if why else EQUAL
    return Verdict(kind=kind, why=why, faults=ran.faults)


def _of_a_failure(program: type[Program], way: str, ran: Ran) -> tuple[str, str]:
    """Return kind and reason of a run that ended with another code than 0."""
    allowed = program.refused.get(way, program.refused.get("job") if way not in WORLDS else None)
    if ran.sentence and allowed is not None and allowed in ran.sentence:
        return REFUSED, f"refused: {ran.sentence}"
    if ran.sentence and way in MAY_BE_REFUSED:
        return EQUAL, f"refused: {ran.sentence}"
    if ran.sentence:
        return WRONG, f"refused, which is not expected: {ran.sentence}"
    return WRONG, f"exit code {ran.code}\n{ran.end}"


def _differs_in_bits(ran: Ran, plain: Ran) -> str:
    """Return where a training with offloading differs from the plain one; empty if nowhere."""
    if not ran.bits:
        return "it said nothing"
    for bits, says in zip(ran.bits, ran.says, strict=True):
        if says != plain.says[0]:
            return f"says {_difference(says, plain.says[0], 0.0)}"
        if bits != plain.bits[0]:
            return "other bits than plain PyTorch, though all that it says is equal"
    return ""


def _differs(way: str, ran: Ran, others: Mapping[str, Ran]) -> str:
    """Return where a job differs from plain PyTorch (the job of one) or from the job of one; empty if nowhere."""
    if len(ran.digests) < MEMBERS[way]:
        return f"{len(ran.digests)} members said a digest"
    if way == "one":
        plain = others.get("plain")
        return f"says {found}" if plain and (found := _difference(ran.says[0], plain.says[0], CLOSE)) else ""
    one = others.get("one")
    if one is None or not one.digests:
        return ""
    if wrong := set(ran.digests) - set(one.digests):
        figures = _difference(ran.says[-1], one.says[0], 0.0)
        return f"digests {sorted(wrong)} for {one.digests[0]}{f'; says {figures}' if figures else ''}"
    return ""


def _difference(found: Mapping[str, Any], right: Mapping[str, Any], close: float) -> str:
    """Return the first figure that differs, with both values; empty if none does."""
    for name in {**right, **found}:
        mine, theirs = found.get(name), right.get(name)
        if not _same(mine, theirs, close):
            return f"{name}={mine} for {theirs}"
    return ""


def _same(mine: Any, theirs: Any, close: float) -> bool:
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(_same(a, b, close) for a, b in zip(mine, theirs, strict=True))
    if isinstance(mine, float) and isinstance(theirs, float):
        if not (math.isfinite(mine) and math.isfinite(theirs)):
            return repr(mine) == repr(theirs)
        return abs(mine - theirs) <= close * max(1.0, abs(theirs))
    return bool(mine == theirs)


def together(verdicts: Sequence[Verdict]) -> str:
    """Return what a program comes to: the worst of its ways."""
    return next(kind for kind in WORST_FIRST if any(each.kind == kind for each in verdicts))
