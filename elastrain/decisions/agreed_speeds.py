"""Speeds of members, by which the runs of a step are handed out: a pure function of all votes and of the last record.

Only a record changes them, so all members hand out alike. A member that no record names is as fast as the median one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import median

from elastrain.job.run_plan import MEDIAN_SPEED, Speeds, plan
from elastrain.job.values import Record

_ALIKE = 0.05
"""Relative difference from the median speed up to which a member counts as fast as the median one."""
_LEAST_S = 0.02
"""A smaller difference in the seconds of a micro-batch does not count, however large it is relatively."""
_LEAST_GAIN = 0.05
"""Part of a step's computing time that other speeds must gain. Less is within the noise."""


def speeds_of(record: Record | None) -> Speeds:
    """Return the speeds in force. `record`: that of the newest committed step, or None before the first commit."""
    return {} if record is None else dict(record.findings.speeds)


def agreed_speeds(present: Speeds, told_s: Mapping[str, float], members: Sequence[str], runs: int) -> Speeds:
    """Return the speeds for the next step. They stay if others would gain too little.

    Args:
        present: the speeds by which the open step's runs were handed out.
        told_s: member -> seconds of a micro-batch, of members that computed enough of them.
        members: the members of the view, in rank order.
        runs: the number of runs of a step.
    """
    stay = {m: present[m] for m in members if m in present}
    # A clock cannot show other values. One NaN would make every comparison false.
    told_s = {m: told_s[m] for m in members if m in told_s and isfinite(told_s[m]) and told_s[m] > 0}
    if not told_s:
        return stay
    # Seconds of a member with speed 1. Members that were not measured keep their speeds relative to the others.
    unit_s = median(s * stay.get(m, MEDIAN_SPEED) for m, s in told_s.items())
    speeds = {m: unit_s / told_s[m] if m in told_s else stay.get(m, MEDIAN_SPEED) for m in members}
    middle = median(speeds.values())
    found: dict[str, int] = {}
    for member, speed in speeds.items():
        hundredths = max(1, min(MEDIAN_SPEED**2, round(MEDIAN_SPEED * speed / middle)))
        # Jobs of tiny micro-batches would hand out anew after every hiccup of the machine.
        is_near = member in told_s and abs(told_s[member] - unit_s / middle) <= _LEAST_S
        if not is_near and abs(hundredths - MEDIAN_SPEED) > _ALIKE * MEDIAN_SPEED:
            found[member] = hundredths
    if found == stay:
        return stay
    # Most differences gain nothing: with few runs, or where a member is a little slower than before.
    before, after = (_step_takes(handed, found, members, runs) for handed in (stay, found))
    return found if after <= (1 - _LEAST_GAIN) * before else stay


def told_speeds(before: Speeds, now: Speeds) -> str:
    """Return a sentence for people about speeds that have changed."""
    if not now:
        return f"{', '.join(before)} about as fast as the other members again: all get equal shares of the runs"
    named = ", ".join(f"{member} {speed} %" for member, speed in now.items())
    return f"members get shares of the runs by their speeds: {named} of the median member's"


def _step_takes(handed: Speeds, true: Speeds, members: Iterable[str], runs: int) -> float:
    """Return the time until the last member is done, in median members' runs, if runs go by `handed`."""
    return max(len(its) * MEDIAN_SPEED / true.get(m, MEDIAN_SPEED) for m, its in plan(members, runs, handed).items())
