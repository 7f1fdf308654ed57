"""The arithmetic of a loss: pure functions from journals to figures. The README says what each figure means.

No process, no file and no clock may come in here.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastrain.job.batch import DataOrder
from elastrain.job.run_plan import plan
from experiments.journals import Member, MicroBatch, Run, View

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one death cost those who were left, in seconds."""

    member: str
    step: int
    """The step that it interrupted."""
    killed_s: float
    detected_s: float
    resumed_s: float
    """When the last survivor had heard of all others in the new view."""
    detect_s: float
    comm_recovery_s: float
    redone_s: float
    overhead_s: float | None
    """None without an undisturbed step of the same members to compare with."""
    standstill_s: float


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """What the coming back of a member cost those who were there, in seconds."""

    member: str
    step: int
    """The first step in which it computed."""
    entry_stall_s: float
    """Longest wait of a survivor between the view with the newcomer and that step, less its usual wait."""
    standstill_s: float
    """Longest time in which no survivor computed, from that view to the first micro-batch of that step."""
    first_step_stall_s: float | None
    """Longest wait of a survivor at the end of the newcomer's first step, less its usual wait, and less what the
    unluckiest member waits beyond its usual at the end of an undisturbed step; None if no step followed."""
    warm_up_s: float
    """From the start of its process to its first micro-batch."""

    @property
    def stall_s(self) -> float:
        """The longest wait of a survivor that is owed to the newcomer, wherever it came."""
        return max(self.entry_stall_s, self.first_step_stall_s or 0.0)


# ------------------------------------------------------------------------------------------------------ spans and steps


def longest_gap_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """The longest part of `start_s..end_s` that no span touches."""
    covered_until_s, longest = start_s, 0.0
    for begin, end in sorted(spans):
        if begin > covered_until_s:
            longest = max(longest, min(begin, end_s) - covered_until_s)
        covered_until_s = max(covered_until_s, end)
        if covered_until_s >= end_s:
            return longest
    return max(longest, end_s - covered_until_s)


def spans_of(members: Iterable[Member]) -> list[Span]:
    return [(work.started_s, work.ended_s) for member in members for work in member.micro_batches]


def of_step(member: Member, step: int) -> list[MicroBatch]:
    return [work for work in member.micro_batches if work.step == step]


def step_wall_s(members: Sequence[Member], step: int) -> float | None:
    """From the last member's end of the step before to the last one's end of this; None if it is not all there."""
    if not members or not all({step - 1, step} <= member.advanced_s.keys() for member in members):
        return None
    return max(m.advanced_s[step] for m in members) - max(m.advanced_s[step - 1] for m in members)


def undisturbed_steps(run: Run, view: View) -> list[int]:
    """Steps after the very first that were done by the members of `view`, wholly inside it, from end to end."""
    members = [run.members[name] for name in view.members]
    later = [other.at_s for other in run.views if other.at_s > view.at_s]
    deaths = [at_s for name, at_s in run.deaths_s.items() if name in view.members]
    until_s = min([*later, *deaths], default=float("inf"))
    common = set.intersection(*(set(member.advanced_s) for member in members)) if members else set()

    def inside(step: int) -> bool:
        begins_s = min(member.advanced_s[step - 1] for member in members)
        return view.at_s <= begins_s and max(member.advanced_s[step] for member in members) <= until_s

    return [step for step in sorted(common) if step >= 1 and step - 1 in common and inside(step)]


def boundary_gap_s(member: Member, step: int) -> float | None:
    """A member's wait from its last micro-batch of `step` to its first of the next; None if one is missing."""
    before, after = of_step(member, step), of_step(member, step + 1)
    if not before or not after:
        return None
    return min(work.started_s for work in after) - max(work.ended_s for work in before)


def usual_gap_s(run: Run, member: Member, view: View) -> float:
    """The median wait of a member between two undisturbed steps of `view`; 0 if there were none."""
    steps = undisturbed_steps(run, view)
    gaps = [boundary_gap_s(member, step) for step, following in pairwise(steps) if following == step + 1]
    return statistics.median([gap for gap in gaps if gap is not None] or [0.0])


# ------------------------------------------------------------------------------------------------------------- one loss


def loss_of(run: Run, victim: str, killed_s: float, *, runs: int) -> Loss:
    """What the death of `victim` at `killed_s` cost; `runs` are the runs of micro-batches in a step.

    Raises ValueError if the journals show no view without it or no survivor that resumed.
    """
    after = run.view_without(victim)
    if after is None:
        raise ValueError(f"{victim} was killed but no view without it followed")
    before = run.view_before(after)
    survivors = [run.members[name] for name in after.members if name in before.members]
    resumed = [member.resumed_s[after.generation] for member in survivors if after.generation in member.resumed_s]
    if not resumed or len(resumed) < len(survivors):
        raise ValueError(f"{len(resumed)} of {len(survivors)} survivors resumed in generation {after.generation}")
    known = [member.lost_s[victim] for member in survivors if victim in member.lost_s]
    known += [run.deaths_s[victim]] if victim in run.deaths_s else []
    # A whole node may be gone by the word of the majority that no longer reaches it, before any death is proven.
    known += [at_s for node, at_s in run.silences if node == run.nodes.get(victim) and at_s >= killed_s]
    detected_s = min(known, default=after.at_s)
    step = interrupted_step(survivors, killed_s)
    redone_s = max(time_of_extra_runs_s(member, step, plan(before.members, runs)[member.id]) for member in survivors)
    return Loss(
        member=victim,
        step=step,
        killed_s=killed_s,
        detected_s=detected_s,
        resumed_s=max(resumed),
        detect_s=detected_s - killed_s,
        comm_recovery_s=max(resumed) - detected_s,
        redone_s=redone_s,
        overhead_s=_overhead_s(run, survivors, step, before, redone_s),
        standstill_s=standstill_s(survivors, step, killed_s),
    )


def interrupted_step(survivors: Iterable[Member], killed_s: float) -> int:
    """The lowest step that some survivor had still to end at that moment."""
    ended = [[step for step, at_s in member.advanced_s.items() if at_s <= killed_s] for member in survivors]
    # One that has only just joined has ended nothing: it says nothing about where the others are.
    return min((max(steps) + 1 for steps in ended if steps), default=0)


def time_of_extra_runs_s(member: Member, step: int, quota: Sequence[int]) -> float:
    """Time inside micro-batches of runs that were not the member's own at the beginning of the step."""
    return sum(work.ended_s - work.started_s for work in of_step(member, step) if work.run not in quota)


def standstill_s(survivors: Sequence[Member], step: int, from_s: float) -> float:
    """The longest time after `from_s` in which none of them computes, up to the next step's first micro-batch's end."""
    ends = [work.ended_s for member in survivors for work in of_step(member, step + 1)]
    until_s = min(ends, default=max((end for _, end in spans_of(survivors)), default=from_s))
    return longest_gap_s(spans_of(survivors), from_s, until_s)


def undisturbed_standstills_s(run: Run, view: View) -> list[float]:
    """The same from the first micro-batch of each undisturbed step on: the ordinary gap at the end of a step."""
    members = [run.members[name] for name in view.members]
    steps = undisturbed_steps(run, view)
    found = []
    for step, following in pairwise(steps):
        starts = [work.started_s for member in members for work in of_step(member, step)]
        if starts and following == step + 1:
            found.append(standstill_s(members, step, min(starts)))
    return found


def _overhead_s(run: Run, survivors: Sequence[Member], step: int, before: View, redone_s: float) -> float | None:
    wall_s = step_wall_s(survivors, step)
    usual = undisturbed_walls_s(run, len(before.members))
    if wall_s is None or not usual:
        return None
    return wall_s - statistics.median(usual) - redone_s


def undisturbed_walls_s(run: Run, members: int) -> list[float]:
    """Wall times of the undisturbed steps of all views with so many members."""
    found = []
    for view in run.views:
        if len(view.members) == members:
            present = [run.members[name] for name in view.members]
            found += [step_wall_s(present, step) for step in undisturbed_steps(run, view)]
    return [wall for wall in found if wall is not None]


# ------------------------------------------------------------------------------------------------------ one coming back


def rejoin_of(run: Run, newcomer: str) -> Rejoin | None:
    """What the newcomer cost those who were there; None if it has not computed anything yet."""
    view, works = run.first_view_with(newcomer), run.members[newcomer].micro_batches
    if view is None or not works or run.views.index(view) == 0:
        return None
    before = run.view_before(view)
    first = min(work.step for work in works)
    there = [run.members[name] for name in before.members if name in view.members]
    stalls = [_stall_s(run, member, before, view.at_s, first) for member in there]
    following = _worst_wait_s(run, there, view, first)
    return Rejoin(
        member=newcomer,
        step=first,
        entry_stall_s=max(stalls, default=0.0),
        standstill_s=standstill_s(there, first - 1, view.at_s),
        first_step_stall_s=None if following is None else following - _usual_worst_wait_s(run, there, view),
        warm_up_s=min(work.started_s for work in works) - run.started_s[newcomer],
    )


def _worst_wait_s(run: Run, members: Sequence[Member], view: View, step: int) -> float | None:
    """At the end of `step`, the longest wait of one of these members beyond its usual one."""
    gaps = [
        gap - usual_gap_s(run, member, view) for member in members if (gap := boundary_gap_s(member, step)) is not None
    ]
    return max(gaps, default=None)


def _usual_worst_wait_s(run: Run, members: Sequence[Member], view: View) -> float:
    """The median of the same over the undisturbed steps of `view`; 0 if there were none."""
    steps = undisturbed_steps(run, view)
    found = [_worst_wait_s(run, members, view, step) for step, after in pairwise(steps) if after == step + 1]
    return statistics.median([worst for worst in found if worst is not None] or [0.0])


def _stall_s(run: Run, member: Member, before: View, from_s: float, first: int) -> float:
    starts = [work.started_s for work in of_step(member, first)]
    until_s = min(starts, default=from_s)
    return longest_gap_s(spans_of([member]), from_s, until_s) - usual_gap_s(run, member, before)


# -------------------------------------------------------------------------------------------------------- the whole run


def steps_lost(members: Iterable[Member]) -> int:
    """Committed steps that some member passed again, or that it fell back behind: 0 in a run that lost nothing."""
    lost = 0
    for member in members:
        numbers = [passed.step for passed in member.passed]
        lost += sum(1 for earlier, later in pairwise(numbers) if later <= earlier)
    return lost


def wrong_samples(members: Iterable[Member], order: DataOrder) -> list[int]:
    """Steps whose committed samples are not exactly those of the data order, once each."""
    wrong = set()
    for member in members:
        for passed in member.passed:
            wanted = step_fingerprint(order, passed.step)
            if (passed.fingerprint, passed.samples) != (wanted, order.global_batch_size):
                wrong.add(passed.step)
    return sorted(wrong)


def samples_amiss(members: Iterable[Member], order: DataOrder, steps: int) -> tuple[int, int]:
    """Samples that the committed steps lack, and samples that they have too often: a step with the wrong fingerprint
    counts whole as both."""
    members = list(members)
    wrong = set(wrong_samples(members, order))
    never = set(uncommitted(members, steps))
    return len(wrong | never) * order.global_batch_size, len(wrong) * order.global_batch_size


def step_fingerprint(order: DataOrder, step: int) -> int:
    """Of all samples of the step, each once; 0..2**64-1."""
    return sum(order.fingerprint(step, index) for index in range(order.micro_batches)) % (1 << 64)


def uncommitted(members: Iterable[Member], steps: int) -> list[int]:
    """Steps of `0..steps-1` that nobody passed."""
    passed = {passed.step for member in members for passed in member.passed}
    return [step for step in range(steps) if step not in passed]


def loss_curve(members: Iterable[Member]) -> list[tuple[float, int, float]]:
    """`(time, step, loss)` of each committed step, at the moment when the first member knew it."""
    first: dict[int, tuple[float, float]] = {}
    for member in members:
        for passed in member.passed:
            if passed.loss is not None and passed.at_s < first.get(passed.step, (float("inf"), 0.0))[0]:
                first[passed.step] = (passed.at_s, passed.loss)
    return [(at_s, step, loss) for step, (at_s, loss) in sorted(first.items())]


def phase_names(run: Run) -> Counter[str]:
    """How often each phase was struck by a fault."""
    return Counter(fault.phase for member in run.members.values() for fault in member.faults)
