"""Decides who is a member: the next view, restarts, failures of the user's code, specs. Each decision has its reason.

Values in, values out: no clock, no store, no process may come in here. The agents call these functions; several of them
decide at once, and the store takes the first answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastrain.base.resume import is_taken_over
from elastrain.job.world import Member, View

HoldersByShard = Mapping[str, Sequence[str]]
"""Shard name -> ids of its verified holders, primary first."""


NOBODY_LEFT = "every member of the view is gone, and with them the state"


class Outcome(StrEnum):
    """What follows from the wish to change a view: a new view, none, a wait, or the end of the job."""

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


# Answers that no view comes with: whether to restart a worker, whether a failure ends the job.
@dataclass(frozen=True, kw_only=True)
class Ruling:
    """A yes or no with its reason."""

    yes: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception in the user's code. The same `place` and `signature` on two members: the code is at fault."""

    member: str
    step: int
    micro_batch: int | None
    signature: str
    # Lines of a traceback name folders, which differ between machines: it takes no part in the comparison.
    traceback: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        return f"step {self.step}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")


def first_view(members: Sequence[Member]) -> View:
    """The view of generation 1, in the given order, which becomes the order of ranks."""
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
    """Propose the next view, if one is wanted and allowed.

    dead: members that are proven dead. They go, whatever this agent believes about holders: the members that remain
        compare what they have, and say so themselves if state is lost. Where none remain, it is lost.
    suspected: members that are only silent. They go only if a strict majority of the old view remains and has every
        shard by `holders`; where that fails, the dead go alone.
    holders: who holds what, by the word of a living member of this view; None where nobody here has heard one.
    joining: members that are ready. They wait while a removal waits.
    begun: whether a step was committed. Before that the initial state is as good with any member, also with newcomers
        alone, so that nothing can be lost.
    """
    # Before the first commit no member holds anything that another could not make: nothing can be missing.
    holders = holders if begun else {}
    begun = begun or view.begun
    proven = tuple(m for m in view.ids if m in dead)
    silent = tuple(m for m in view.ids if m in suspected and m not in dead)
    newcomers = tuple(m for m in joining if m.id not in view and m.id not in dead)
    if silent:
        whole = _without(view, (*proven, *silent), newcomers, begun=begun)
        unfit = _unfit(view, (*proven, *silent), holders)
        # Silence is not proof: those who are silent may think the same of us. Of two halves that do not hear each other
        # at most one is a strict majority, so at most one goes on.
        majority = 2 * (len(view.members) - len(proven) - len(silent)) > len(view.members)
        if majority and not unfit:
            return whole
        if not proven:
            return Proposal(outcome=Outcome.WAIT, reason=_why_wait(silent, majority, unfit))
        # Newcomers would count in the next majority, and could turn a minority into one.
        newcomers = ()
    if not proven and not newcomers:
        return Proposal(outcome=Outcome.KEEP, reason="nobody goes and nobody comes")
    return _without(view, proven, newcomers, begun=begun)


def with_quotas(view: View, quotas: Mapping[str, int]) -> View | None:
    """Make the next view, of the same members, where some are to get another quota; None where all have theirs."""
    # Like one that only adds members, it waits for the end of the step: nobody is lost, nothing is computed again.
    changed = {m.id: quotas[m.id] for m in view.members if quotas.get(m.id, m.quota) != m.quota}
    if not changed:
        return None
    members = tuple(replace(m, quota=changed.get(m.id, m.quota)) for m in view.members)
    words = ", ".join(f"{member} gets {quota} quarters of a share" for member, quota in changed.items())
    return replace(view, generation=view.generation + 1, members=members, reason=words)


def missing_state(holders: HoldersByShard, members: Collection[str]) -> str:
    """Name the shards that no one of `members` holds, in a sentence; empty if every shard has a holder."""
    gone = {shard: held for shard, held in holders.items() if not any(m in members for m in held)}
    if not gone:
        return ""
    lost_holders = sorted({m for held in gone.values() for m in held})
    return (
        f"{len(gone)} of {len(holders)} shards have no living holder ({_some(sorted(gone))}; held by "
        f"{_some(lost_holders)}): start again from a durable checkpoint, and use more backups against such losses"
    )


def redundancy(holders: HoldersByShard, alive: Collection[str], backups: int) -> str:
    """Say what the living members can still lose, in words for the operator; empty before anything is known.

    Says "copying" where there are fewer copies than the members that live could hold: those copies are being made.
    """
    if not holders or not alive:
        return ""
    # The weakest shard decides: the job ends when one shard has no holder.
    spare = min(len(set(held) & set(alive)) for held in holders.values()) - 1
    if spare < 0:
        return "some shards have no living holder"
    words = f"every shard survives the loss of {spare} more" if spare else "some shards are held by one member only"
    return words + (", copying" if spare < min(backups, len(alive) - 1) else "")


def may_restart(*, exit_code: int, finishing: bool, refused: bool, used: int, allowed: int) -> Ruling:
    """Decide whether a worker that ended is started again. `exit_code` < 0 is minus the signal that ended it."""
    # The order of the questions is that of the reasons that an operator wants to read.
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
    """Decide whether an exception in the user's code ends the job: before the first commit, or the same on two members.

    `earlier`: the failures heard of before, from all nodes.
    """
    # Before the first commit the script has never worked: to try it on another member would only delay the traceback.
    if not committed:
        return Ruling(yes=True, reason=f"the script raised on {failure.member} before the first commit")
    # One member may raise because its machine is broken. Two that raise alike at one place share only the script.
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
    """Name the first setting that differs, with both values and what to do, in one sentence; empty if all are equal."""
    # Sorted, so that every agent names the same one.
    for key in sorted(name for name in {*expected, *came} if not is_taken_over(name)):
        ours, theirs = expected.get(key, "(unset)"), came.get(key, "(unset)")
        if ours != theirs:
            return f"its {key} is {theirs}, the job's is {ours}: {_what_to_do(key)}"
    return ""


_SAME_MACHINES = (
    "start every worker on the same kind of processor, with the same libraries and the same ATEN_CPU_CAPABILITY, "
    "ONEDNN_MAX_CPU_ISA and MKL_CBWR in its environment (elastrain.init(deterministic=False) lets such workers in)"
)
# Only settings whose own name does not say what to change.
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
    """Propose a view without one member where living members do not reach one another.

    suspicions: member -> the members that suspect it.
    answering: members that are not proven dead, on nodes whose agents answer; words of and about others count nothing.

    The member is one of those who suspect or are suspected; where members that hold state suspect each other, it is one
    of these. A member whose end would leave a shard without a holder stays, unless that is so for all. The most
    suspected goes first; if equal, a newcomer before a holder, then the later in the view.
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
        # A newcomer has just opened its links, and may be what is wrong: its word weighs half, and nothing against a
        # holder whom no other holder suspects. (It once ended the only member that had the state.)
        firm = len(words[member] & keep)
        votes = 2 * firm + len(words[member] - keep)
        return (votes if firm or member not in keep else 0), member not in keep, view.ids.index(member)

    fit = [m for m in parties if not missing_state(holders, set(here) - {m})]
    member = max(fit or parties, key=rank)
    by = [m for m in here if m in words[member]]
    others = [m for m in here if member in words[m]]
    how = f"{_some(by)} cannot reach it" if by else f"it cannot reach {_some(others)}"
    what = "it is ended" if fit else "it is ended, though each of them holds what nobody else does"
    # The next view is as after its death; it learns from it that it has to end.
    proposal = _without(view, [member], (), begun=begun or view.begun)
    return replace(proposal, reason=f"{member} lives, but {how}: {what}")


def with_new_links(view: View, suspect: Proposal) -> Proposal:
    """Propose the same members instead of one less: nobody is dead, so that their links may come about again.

    To be tried first, and once; where links do not come about, a member has to go.
    """
    reason = f"{suspect.reason.partition(':')[0]}: all links between nodes are made anew"
    generation = view.generation + 1
    begun = suspect.view.begun if suspect.view is not None else view.begun
    renewed = replace(view, generation=generation, reason=reason, begun=begun, links_since=generation)
    return Proposal(outcome=Outcome.CHANGE, reason=reason, view=renewed)


def with_step_anew(view: View, proposed: View | None, reason: str) -> View:
    """Make the next view one in which the open step begins anew; `proposed`: what it is to be besides, if anything."""
    generation = view.generation + 1
    if proposed is None:
        return replace(view, generation=generation, reason=f"step anew: {reason}", anew_since=generation)
    return replace(proposed, reason=f"{proposed.reason}; step anew: {reason}", anew_since=generation)


def _parties(words: Mapping[str, Collection[str]]) -> set[str]:
    """The members that suspect another, or are suspected."""
    return {m for m, by in words.items() if by} | {m for by in words.values() for m in by}


def _without(view: View, gone: Sequence[str], newcomers: Sequence[Member], *, begun: bool) -> Proposal:
    # Ranks of those who stay keep their order, and newcomers come last, so that little of the plan moves.
    rest = tuple(m for m in view.members if m.id not in gone)
    # Newcomers alone may begin a job, but not go on with one: the state died with the last member that had it.
    if not rest and not (newcomers and not begun):
        return Proposal(outcome=Outcome.LOST, reason=NOBODY_LEFT)
    # Said in the order of what an operator asks first: what was lost, then what has come.
    reason = "; ".join(_clause(word, ids) for word, ids in (("lost", gone), ("joined", _ids(newcomers))) if ids)
    return Proposal(
        outcome=Outcome.CHANGE,
        reason=reason,
        view=View(
            generation=view.generation + 1,
            members=(*rest, *newcomers),
            reason=reason,
            begun=begun,
            links_since=view.links_since,
            anew_since=view.anew_since,
        ),
    )


def _unfit(view: View, gone: Sequence[str], holders: HoldersByShard | None) -> str:
    """Say why those who remain may not go on alone; empty if they may."""
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
