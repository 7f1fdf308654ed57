"""Decisions about who is a member: views, restarts, failures of the user's code, specs. Each returns its reason too.

Values in, values out: no clock, no store, no process may come in here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastrain.world import Member, View

HoldersByShard = Mapping[str, Sequence[str]]
"""Shard name -> ids of its verified holders, primary first."""


NOBODY_LEFT = "every member of the view is gone, and with them the state"


class Outcome(StrEnum):
    """What may be done about the wish to change a view."""

    CHANGE = "change"
    KEEP = "keep"
    WAIT = "wait"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """`view` is set if and only if `outcome` is CHANGE. `reason` is one clause or sentence for logs and `status`."""

    outcome: Outcome
    reason: str
    view: View | None = None


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """A yes or no, and why."""

    yes: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The user's code raised. Equal `place` and `signature` on two members mean: it is the code, not the machine."""

    member: str
    step: int
    micro_batch: int | None
    signature: str
    traceback: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        return f"step {self.step}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")


def first_view(members: Sequence[Member]) -> View:
    """Generation 1, in the given order."""
    return View(generation=1, members=tuple(members), reason=f"all {len(members)} workers are ready")


def propose(
    view: View,
    *,
    holders: HoldersByShard | None,
    dead: Collection[str] = (),
    suspected: Collection[str] = (),
    joining: Sequence[Member] = (),
    begun: bool = True,
) -> Proposal:
    """The next view, if one is wanted and allowed.

    `dead` are proven dead, `suspected` only silent; `joining` are ready. The dead go, whatever is believed about
    holders: those who remain compare what they have, and it is they who say so if state is lost. Where none remain, it
    is. The silent go only if a strict majority of the old view remains which, by `holders` (the word of a living member
    of this view; None: nobody here has one), has every shard. Where a suspicion stands in the way, the dead go alone.
    While a removal waits nobody joins: joiners must not turn a minority into a majority. Until a job has `begun` (a
    step was committed), the initial state is as good with anybody, also with newcomers alone.
    """
    holders = holders if begun else {}
    begun = begun or view.begun
    proven = tuple(m for m in view.ids if m in dead)
    silent = tuple(m for m in view.ids if m in suspected and m not in dead)
    newcomers = tuple(m for m in joining if m.id not in view and m.id not in dead)
    if silent:
        whole = _without(view, (*proven, *silent), newcomers, begun=begun)
        unfit = _unfit(view, (*proven, *silent), holders)
        # The strict majority of the rule: silence is not proof.
        majority = 2 * (len(view.members) - len(proven) - len(silent)) > len(view.members)
        if majority and not unfit:
            return whole
        if not proven:
            return Proposal(outcome=Outcome.WAIT, reason=_why_wait(silent, majority, unfit))
        newcomers = ()
    if not proven and not newcomers:
        return Proposal(outcome=Outcome.KEEP, reason="nobody goes and nobody comes")
    return _without(view, proven, newcomers, begun=begun)


def missing_state(holders: HoldersByShard, members: Collection[str]) -> str:
    """Empty if every shard has a holder among `members`; else a sentence that names the shards that are gone."""
    gone = {shard: held for shard, held in holders.items() if not any(m in members for m in held)}
    if not gone:
        return ""
    lost_holders = sorted({m for held in gone.values() for m in held})
    return (
        f"{len(gone)} of {len(holders)} shards have no living holder ({_some(sorted(gone))}; held by "
        f"{_some(lost_holders)}): start again from a durable checkpoint, and use more backups against such losses"
    )


def redundancy(holders: HoldersByShard, alive: Collection[str], backups: int) -> str:
    """What the living members can still lose, in words for the operator; empty before anything is known.

    `holders`: shard -> those with a verified copy. Fewer copies than could be wanted are being made.
    """
    if not holders or not alive:
        return ""
    spare = min(len(set(held) & set(alive)) for held in holders.values()) - 1
    if spare < 0:
        return "some shards have no living holder"
    words = f"every shard survives the loss of {spare} more" if spare else "some shards are held by one member only"
    return words + (", copying" if spare < min(backups, len(alive) - 1) else "")


def may_restart(*, exit_code: int, finishing: bool, refused: bool, used: int, allowed: int) -> Ruling:
    """Whether a worker that ended is started again. `exit_code` < 0 is minus the signal."""
    if refused:
        return Ruling(yes=False, reason="it was refused; the same worker would be refused again")
    if exit_code == 0:
        return Ruling(yes=False, reason="its script ended by itself")
    if finishing:
        return Ruling(yes=False, reason="the job is finishing")
    if used >= allowed:
        return Ruling(yes=False, reason=f"all {allowed} restarts are used up (--max-restarts)")
    return Ruling(yes=True, reason=f"restart {used + 1} of {allowed}")


def ends_job(failure: Failure, earlier: Sequence[Failure], *, committed: bool) -> Ruling:
    """Whether an exception in the user's code ends the job: before the first commit, or the same from two members."""
    if not committed:
        return Ruling(yes=True, reason=f"the script raised on {failure.member} before the first commit")
    for other in earlier:
        same = other.signature == failure.signature and other.place == failure.place
        if same and other.member != failure.member:
            return Ruling(
                yes=True,
                reason=f"{other.member} and {failure.member} raised the same exception at {failure.place}: "
                "it is a fault in the script, not in a machine",
            )
    return Ruling(yes=False, reason=f"the script raised on {failure.member} at {failure.place}; another member tries")


def spec_difference(expected: Mapping[str, object], came: Mapping[str, object]) -> str:
    """Empty if equal; else one sentence that names the first differing setting and both values."""
    for key in sorted({*expected, *came}):
        ours, theirs = expected.get(key, "(unset)"), came.get(key, "(unset)")
        if ours != theirs:
            return f"its {key} is {theirs}, the job's is {ours}: {_what_to_do(key)}"
    return ""


_SAME_MACHINES = (
    "start every worker on the same kind of processor, with the same libraries and the same ATEN_CPU_CAPABILITY, "
    "ONEDNN_MAX_CPU_ISA and MKL_CBWR in its environment (elastrain.init(deterministic=False) lets such workers in)"
)
_ADVICE = {
    "CPU model": _SAME_MACHINES,
    "result of a fixed": _SAME_MACHINES,
    "hash of a word": "start every worker with the same PYTHONHASHSEED, which decides the order of sets",
}
"""How a setting's name begins -> what to do where its own name does not say it."""


def _what_to_do(key: str) -> str:
    return next((advice for start, advice in _ADVICE.items() if key.startswith(start)), _same(key))


def _same(key: str) -> str:
    return f"start every worker with the same {key}"


def without_a_suspect(
    view: View,
    suspicions: Mapping[str, Collection[str]],
    *,
    holders: HoldersByShard | None,
    answering: Collection[str],
    begun: bool = True,
) -> Proposal:
    """Whom to leave out where living members do not reach one another: one of those who suspect or are suspected.

    `suspicions`: member -> who suspects it; words of, and about, members that are not `answering` (not proven dead, on
    nodes whose agents answer) count for nothing. Where members that hold state suspect each other, it is one of these;
    nobody goes whose end would leave a shard without a holder, unless that holds for all; most suspected first, where a
    newcomer's word weighs half, and against a holder nothing without another holder's. If equal, newcomers first, then
    the later in the view.
    """
    holders = (holders or {}) if begun else {}
    here = [m for m in view.ids if m in answering]
    words = {m: set(suspicions.get(m, ())) & set(here) - {m} for m in here}
    keep = {m for held in holders.values() for m in held}
    among_holders = {m: by & keep for m, by in words.items() if m in keep}
    parties = _parties(among_holders) or _parties(words)
    if not parties:
        return Proposal(outcome=Outcome.KEEP, reason="all who live reach one another")

    def rank(member: str) -> tuple[int, bool, int]:
        firm = len(words[member] & keep)
        votes = 2 * firm + len(words[member] - keep)
        return (votes if firm or member not in keep else 0), member not in keep, view.ids.index(member)

    fit = [m for m in parties if not missing_state(holders, set(here) - {m})]
    member = max(fit or parties, key=rank)
    by = [m for m in here if m in words[member]]
    others = [m for m in here if member in words[m]]
    how = f"{_some(by)} can not reach it" if by else f"it can not reach {_some(others)}"
    what = "it is ended" if fit else "it is ended, though each of them holds what nobody else does"
    proposal = _without(view, [member], (), begun=begun or view.begun)
    return replace(proposal, reason=f"{member} lives, but {how}: {what}")


def _parties(words: Mapping[str, Collection[str]]) -> set[str]:
    """Who suspects, or is suspected."""
    return {m for m, by in words.items() if by} | {m for by in words.values() for m in by}


def _without(view: View, gone: Sequence[str], newcomers: Sequence[Member], *, begun: bool) -> Proposal:
    rest = tuple(m for m in view.members if m.id not in gone)
    if not rest and not (newcomers and not begun):
        return Proposal(outcome=Outcome.LOST, reason=NOBODY_LEFT)
    reason = "; ".join(_clause(word, ids) for word, ids in (("lost", gone), ("joined", _ids(newcomers))) if ids)
    return Proposal(
        outcome=Outcome.CHANGE,
        reason=reason,
        view=View(generation=view.generation + 1, members=(*rest, *newcomers), reason=reason, begun=begun),
    )


def _unfit(view: View, gone: Sequence[str], holders: HoldersByShard | None) -> str:
    """Why those who remain may not go on alone; empty if they may."""
    if holders is None:
        return "no member of this node can tell what the others hold"
    return missing_state(holders, {m for m in view.ids if m not in gone})


def _why_wait(silent: Sequence[str], majority: bool, unfit: str) -> str:
    obstacle = "the others are no strict majority" if not majority else unfit
    return f"{_some(silent)} suspected but not proven dead, and {obstacle}"


def _ids(members: Sequence[Member]) -> tuple[str, ...]:
    return tuple(member.id for member in members)


def _clause(word: str, ids: Sequence[str]) -> str:
    return f"{_some(ids)} {word}"


def _some(names: Sequence[str], limit: int = 6) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
