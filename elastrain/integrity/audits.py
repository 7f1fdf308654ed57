"""Audits: the choice of runs that a second member also computes, and the judgement if two results differ. Pure.

An audit compares a run bit for bit. Its micro-batches are added in place, so that only their sum can be compared. With
`run_length=1`, the default, that is one micro-batch. Results depend only on the job's seed, the step, the distribution
of runs, and the members' checks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastrain.base.arithmetic import mix
from elastrain.job.values import AuditPlan, Check

Told = Mapping[str, Sequence[Check]]
"""Member, in rank order -> its checks."""
_Found = Mapping[int, Mapping[str, str]]
"""Micro-batch -> member -> its check, as text, so that a NaN equals a NaN."""


@dataclass(frozen=True, kw_only=True)
class Audits:
    """Audits of one attempt at a step: the audited runs, and the auditors of each owner's runs."""

    runs: tuple[int, ...] = ()
    ring: tuple[str, ...] = ()
    """Members when the runs were handed out, in rank order."""
    turn: int = 0
    """Distance in the ring from a run's owner to its first auditor."""
    auditors: int = 1
    """Auditors per run."""

    def auditors_of(self, owner: str, living: Collection[str]) -> tuple[str, ...]:
        """Return the living members that audit the runs of `owner`."""
        at = self.ring.index(owner)
        others = (*self.ring[at + 1 :], *self.ring[:at])
        turn = self.turn % max(1, len(others))
        # Lost members are left out at the end, so that a loss moves the audits of the lost member only.
        return tuple(m for m in (*others[turn:], *others[:turn]) if m in living)[: self.auditors]


def audits_of(plan: AuditPlan, step: int, runs: int, members: Sequence[str], *, is_anew: bool = False) -> Audits:
    """Choose the audits of `step`, whose `runs` are handed out to `members`.

    A restarted step has two auditors per run.
    """
    if not plan.every or len(members) < 2:
        return Audits()
    # Another auditor in each step: two members that are wrong in the same way would never find each other's fault.
    draw = mix(mix(plan.seed) ^ step)
    # A restarted step is audited completely, since perhaps no member left knows which micro-batch was wrong. Each run
    # has three results then, and two of them decide.
    if is_anew or plan.is_of_all:
        chosen = tuple(range(runs))
    else:
        chosen = (draw % runs,) if step % plan.every == 0 else ()
    return Audits(runs=chosen, ring=tuple(members), turn=mix(draw), auditors=2 if is_anew else 1)


def duties(plan: AuditPlan, step: int, runs: Mapping[str, Sequence[int]], me: str) -> list[int]:
    """Return the runs that `me` audits in an undisturbed step, if they are handed out as in `runs`."""
    audits = audits_of(plan, step, sum(map(len, runs.values())), tuple(runs))
    owners = {run: member for member, todo in runs.items() for run in todo}
    return [run for run in audits.runs if me in audits.auditors_of(owners[run], runs)]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The outcome of an attempt's audits, according to the votes."""

    disputed: tuple[int, ...] = ()
    """Micro-batches with differing results. If there are any, nothing of this attempt is committed."""
    wrong: tuple[tuple[str, str], ...] = ()
    """(member, sentence) for each time that a member is known to have been wrong."""
    is_hopeless: bool = False
    """True if another attempt would not show either which member is wrong."""


def judge(step: int, now: Told, before: Told) -> Judgement:
    """Compare the members' results of `step`.

    now: checks of this attempt. before: checks of an earlier attempt.
    """
    found, earlier = _by_micro_batch(now), _by_micro_batch(before)
    right = {micro_batch: agreed for micro_batch, by in found.items() if (agreed := _agreed(by)) is not None}
    disputed = tuple(m for m, by in found.items() if len(set(by.values())) > 1)
    undecided = [m for m in disputed if m not in right]
    changing = {
        m: [who for who, what in found[m].items() if earlier.get(m, {}).get(who, what) != what] for m in undecided
    }
    # Both attempts count: a member that was wrong in two attempts has two faults, and has to leave.
    wrong = [*_against(step, right, earlier, found), *_against(step, right, found, found)]
    # If no majority decides, a member whose own result changed is wrong. One accusation is enough, because a fault
    # belongs to the member, not to the micro-batch.
    for m in undecided[:1]:
        which = f"micro-batch {m} of step {step}"
        wrong += [(who, f"{which} came out on {who} with another result each time") for who in changing[m]]
    # Several members whose results change point to a script that is not a function of its data, not to bad memory. If
    # results differ and none changes, two machines compute differently.
    is_hopeless = any(len(earlier.get(m, {})) > 1 and len(changing[m]) != 1 for m in undecided)
    return Judgement(disputed=disputed, wrong=tuple(wrong), is_hopeless=is_hopeless)


def _by_micro_batch(told: Told) -> _Found:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for member, checks in told.items():
        for check in checks:
            found[check.micro_batch][member] = repr(check)
    return dict(sorted(found.items()))


def _agreed(by: Mapping[str, str]) -> str | None:
    """Return the result that at least two members have, and more members than any other result; else None."""
    # A single result proves nothing: it may be the wrong one.
    (first, count), *others = Counter(by.values()).most_common()
    return first if count > 1 and (not others or others[0][1] < count) else None


def _against(step: int, right: Mapping[int, str], told: _Found, found: _Found) -> Iterator[tuple[str, str]]:
    """Yield the members that reported a wrong result, each once, with a sentence."""
    # Bad memory spoils many micro-batches at once. That is one fault, not the second one after which a member leaves.
    accused: dict[str, int] = {}
    for m in (m for m in told if m in right):
        for member in (member for member, result in told[m].items() if result != right[m]):
            accused.setdefault(member, m)
    for member, m in accused.items():
        alike = [other for other, result in found[m].items() if result == right[m]]
        yield member, f"micro-batch {m} of step {step} came out wrong on {member}: {' and '.join(alike)} agree"
