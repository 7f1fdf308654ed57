"""Moments that matter in a running job, told from its journals: who could be struck at one of them, and since when.

Values in, values out: the watching is done by `strikes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from elastrain.job.run_plan import plan
from experiments.journals import Run
from experiments.storm.cases import Case

JUST_JOINED_S = 1.0

Since = Mapping[str, float]
"""Member -> the time at which its moment began."""


def at_moment(when: str, run: Run, living: Collection[str], case: Case) -> Since:
    """Empty while it is not that moment. `living`: who lives of the newest view."""
    known: dict[str, Callable[[], Since]] = {
        "idle": lambda: idle(run, living, case),
        "committed": lambda: committed(run, living),
        "recovering": lambda: recovering(run, living),
        "starting": lambda: starting(run, living),
        "joined": lambda: joined(run, living),
    }
    return known[when]()


def idle(run: Run, living: Collection[str], case: Case) -> Since:
    """Those who have computed all their runs of the present step while another one has not.

    Only in a step that began in the newest view: after a loss in it, others have other runs to do.
    """
    newest = newest_step(run, living)
    if newest is None or newest[1] != run.views[-1].generation:
        return {}
    shares = micro_batches_of(run.views[-1].members, case)
    done_s = {m: _done_s(run, m, newest[0] + 1, shares[m]) for m in living}
    if all(at_s is not None for at_s in done_s.values()):
        return {}
    return {m: at_s for m, at_s in done_s.items() if at_s is not None and shares[m]}


def micro_batches_of(members: Collection[str], case: Case) -> dict[str, set[int]]:
    """Who computes which micro-batches of a step that nobody is lost in."""
    length, count = case.training.run_length, case.training.micro_batches
    runs = plan(members, -(-count // length))
    return {
        member: {i for run in own for i in range(run * length, min(count, (run + 1) * length))}
        for member, own in runs.items()
    }


def _done_s(run: Run, member: str, step: int, share: Collection[int]) -> float | None:
    """When the last of the share was computed; None before."""
    ended = {}
    for each in reversed(run.members[member].micro_batches):
        if each.step < step:
            break
        ended[each.index] = each.ended_s
    return max(ended.values(), default=0.0) if set(share) <= set(ended) else None


def committed(run: Run, living: Collection[str]) -> Since:
    """All, from the moment at which the first has committed a step until the last one's loop goes on."""
    newest = newest_step(run, living)
    if newest is None or all(newest[0] in run.members[m].advanced_s for m in living):
        return {}
    last = (run.members[m].passed[-1] for m in living if run.members[m].passed)
    at_s = min(passed.at_s for passed in last if passed.step == newest[0])
    return dict.fromkeys(living, at_s)


def recovering(run: Run, living: Collection[str]) -> Since:
    """All, while a view without somebody has come to one of them and no step was committed in it."""
    if len(run.views) < 2 or set(run.views[-2].members) <= set(run.views[-1].members):
        return {}
    generation = run.views[-1].generation
    if any(p.generation >= generation for m in living for p in run.members[m].passed[-1:]):
        return {}
    edited = [run.members[m].edited_s[generation] for m in living if generation in run.members[m].edited_s]
    return dict.fromkeys(living, min(edited)) if edited else {}


def starting(run: Run, living: Collection[str]) -> Since:
    """All, while a worker is starting that was in no view yet."""
    seen = {member for view in run.views for member in view.members}
    begun = [at_s for m, at_s in run.started_s.items() if m not in seen and m not in run.deaths_s]
    return dict.fromkeys(living, max(begun)) if begun else {}


def joined(run: Run, living: Collection[str]) -> Since:
    """All, from the moment at which a newcomer is in its first step, for a second."""
    if len(run.views) < 2 or not (new := set(run.views[-1].members) - set(run.views[-2].members)):
        return {}
    generation = run.views[-1].generation
    resumed = [run.members[m].resumed_s[generation] for m in new if generation in run.members[m].resumed_s]
    newest_s = max((p.at_s for m in living for p in run.members[m].passed[-1:]), default=0.0)
    if not resumed or newest_s - max(resumed) > JUST_JOINED_S:
        return {}
    return dict.fromkeys(living, max(resumed))


def newest_step(run: Run, living: Collection[str]) -> tuple[int, int] | None:
    """The last committed step, and the view in which it was."""
    found = [(p.step, p.generation) for m in living for p in run.members[m].passed[-1:]]
    return max(found, default=None)
