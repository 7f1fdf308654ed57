"""Chooses the runs that a second member computes, too, and says who was wrong where the results of two differ.

An audit compares a run bit for bit: its micro-batches are added in place, so that only their sum is there to be
compared (with `run_length=1`, the default, that is one micro-batch). All functions are pure: of the job's seed, the
step, the hand-out of runs, and what came out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastrain.base.arithmetic import mix
from elastrain.job.values import AuditPlan, Check

Told = Mapping[str, Sequence[Check]]
"""Member, in rank order -> what it has computed."""
_Found = Mapping[int, Mapping[str, str]]
"""Micro-batch -> member -> what came out there, as text: a NaN must equal a NaN."""


@dataclass(frozen=True, kw_only=True)
class Audits:
    """The audits of one attempt at a step: which runs, and who computes those of each owner, too."""

    runs: tuple[int, ...] = ()
    ring: tuple[str, ...] = ()
    """The members when the runs were handed out, in rank order."""
    turn: int = 0
    """How far from a run's owner its first auditor is."""
    auditors: int = 1
    """Of each run."""

    def auditors_of(self, owner: str, living: Collection[str]) -> tuple[str, ...]:
        at = self.ring.index(owner)
        others = (*self.ring[at + 1 :], *self.ring[:at])
        turn = self.turn % max(1, len(others))
        # Who is gone is left out afterwards: so a loss moves the audits of the lost member, and no others.
        return tuple(m for m in (*others[turn:], *others[:turn]) if m in living)[: self.auditors]


def audits_of(plan: AuditPlan, step: int, runs: int, members: Sequence[str], *, is_anew: bool = False) -> Audits:
    """The audits of `step`, whose `runs` are handed out to the `members`. One that is begun anew is audited by two."""
    if not plan.every or len(members) < 2:
        return Audits()
    # Another auditor in each step: two members that are wrong in the same way would find nothing in each other.
    draw = mix(mix(plan.seed) ^ step)
    # Anew, all of it: which micro-batch was wrong may be known to nobody who is left. Of three results two decide.
    if is_anew or plan.is_of_all:
        chosen = tuple(range(runs))
    else:
        chosen = (draw % runs,) if step % plan.every == 0 else ()
    return Audits(runs=chosen, ring=tuple(members), turn=mix(draw), auditors=2 if is_anew else 1)


def duties(plan: AuditPlan, step: int, runs: Mapping[str, Sequence[int]], me: str) -> list[int]:
    """The runs that `me` audits in a step that nothing disturbs, where they are handed out so."""
    audits = audits_of(plan, step, sum(map(len, runs.values())), tuple(runs))
    owners = {run: member for member, todo in runs.items() for run in todo}
    return [run for run in audits.runs if me in audits.auditors_of(owners[run], runs)]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the votes of an attempt say of its audits."""

    disputed: tuple[int, ...] = ()
    """Micro-batches that came out differently: nothing of this attempt is committed."""
    wrong: tuple[tuple[str, str], ...] = ()
    """(member, sentence): each time that a member is known to have been wrong."""
    is_hopeless: bool = False
    """To compute it once more would not tell who is wrong, either."""


def judge(step: int, now: Told, before: Told) -> Judgement:
    """Compare what the members have computed of `step`; `before`: what they told in an earlier attempt."""
    found, earlier = _by_micro_batch(now), _by_micro_batch(before)
    right = {micro_batch: agreed for micro_batch, by in found.items() if (agreed := _agreed(by)) is not None}
    disputed = tuple(m for m, by in found.items() if len(set(by.values())) > 1)
    undecided = [m for m in disputed if m not in right]
    changing = {
        m: [who for who, what in found[m].items() if earlier.get(m, {}).get(who, what) != what] for m in undecided
    }
    # Both: a member that was wrong in two attempts has two faults, and is to leave.
    wrong = [*_against(step, right, earlier, found), *_against(step, right, found, found)]
    # Where nobody else can say which is right. One is enough: a fault is a member's, not a micro-batch's.
    for m in undecided[:1]:
        which = f"micro-batch {m} of step {step}"
        wrong += [(who, f"{which} came out on {who} with another result each time") for who in changing[m]]
    # Several that change are no bad memory but a script that is no function of its data; none that changes but differs
    # are two machines that compute otherwise.
    is_hopeless = any(len(earlier.get(m, {})) > 1 and len(changing[m]) != 1 for m in undecided)
    return Judgement(disputed=disputed, wrong=tuple(wrong), is_hopeless=is_hopeless)


def _by_micro_batch(told: Told) -> _Found:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for member, checks in told.items():
        for check in checks:
            found[check.micro_batch][member] = repr(check)
    return dict(sorted(found.items()))


def _agreed(by: Mapping[str, str]) -> str | None:
    """What two members at the least have, and more than have anything else."""
    # One alone proves nothing: it may be the one that is wrong.
    (first, count), *others = Counter(by.values()).most_common()
    return first if count > 1 and (not others or others[0][1] < count) else None


def _against(step: int, right: Mapping[int, str], told: _Found, found: _Found) -> Iterator[tuple[str, str]]:
    """Members that told otherwise; each once, however many micro-batches it was."""
    # A bad memory spoils many at once: that is one fault, and not the second after which a member leaves.
    accused: dict[str, int] = {}
    for m in (m for m in told if m in right):
        for member in (member for member, result in told[m].items() if result != right[m]):
            accused.setdefault(member, m)
    for member, m in accused.items():
        alike = [other for other, result in found[m].items() if result == right[m]]
        yield member, f"micro-batch {m} of step {step} came out wrong on {member}: {' and '.join(alike)} agree"
