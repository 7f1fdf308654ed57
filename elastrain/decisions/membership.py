"""Decisions about membership: the next view, restarts, specs. Each has a reason.

Pure: no clock, no store, no process. The agents call these functions. Several agents decide at the same time, and the
store accepts the first answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elastrain.base.resume import LOADED, OF_THE_DEVICE, OWN, is_taken_over
from elastrain.job.world import Member, View

HoldersByShard = Mapping[str, Sequence[str]]
"""Shard name -> ids of its verified holders, primary first."""


NOBODY_LEFT = "every member of the view is gone, and with them the state"


class Outcome(StrEnum):
    """Kind of answer to a wanted change of the view: a new view, no change, a wait, or the end of the job."""

    CHANGE = "change"
    KEEP = "keep"
    WAIT = "wait"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """An answer to a wanted change of the view.

    `view` is set if and only if `outcome` is CHANGE. `reason` is one clause or sentence for logs and `status`.
    """

    outcome: Outcome
    reason: str
    view: View | None = None


# For answers without a view: whether a worker is restarted, and whether a failure ends the job.
@dataclass(frozen=True, kw_only=True)
class Ruling:
    """A yes or no with its reason."""

    yes: bool
    reason: str


def first_view(members: Sequence[Member]) -> View:
    """Return the view of generation 1. The given order becomes the order of ranks."""
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

    Args:
        view: the present view.
        holders: the holders of each shard, as a living member of this view reports them; None if no report has come.
        dead: members that are proven dead. They are always removed: the remaining members compare what they have, and
            report lost state themselves. If none remain, the state is lost.
        suspected: members that are only silent. They are removed only if a strict majority of the old view remains and
            has every shard by `holders`. Otherwise only the dead are removed.
        joining: members that are ready. They wait while a removal waits.
        begun: True if a step may have been committed. Before that no state can be lost, because any member can make the
            initial state, also newcomers alone.
    """
    # Before the first commit no member holds anything that another could not make, so nothing can be missing.
    holders = holders if begun else {}
    begun = begun or view.begun
    proven = tuple(m for m in view.ids if m in dead)
    silent = tuple(m for m in view.ids if m in suspected and m not in dead)
    newcomers = tuple(m for m in joining if m.id not in view and m.id not in dead)
    if silent:
        whole = _without(view, (*proven, *silent), newcomers, begun=begun)
        unfit = _unfit(view, (*proven, *silent), holders)
        # Silence is not proof: the silent members may suspect us in turn. Of two halves that do not hear each other at
        # most one is a strict majority, so at most one goes on.
        majority = 2 * (len(view.members) - len(proven) - len(silent)) > len(view.members)
        if majority and not unfit:
            return whole
        if not proven:
            return Proposal(outcome=Outcome.WAIT, reason=_why_wait(silent, majority, unfit))
        # Newcomers would count in the next majority, and could turn a minority into one.
        newcomers = ()
    if not proven and not newcomers:
        return Proposal(outcome=Outcome.KEEP, reason="no member goes and no member comes")
    return _without(view, proven, newcomers, begun=begun)


def missing_state(holders: HoldersByShard, members: Collection[str]) -> str:
    """Return a sentence about the shards that none of `members` holds; empty if every shard has a holder."""
    gone = {shard: held for shard, held in holders.items() if not any(m in members for m in held)}
    if not gone:
        return ""
    lost_holders = sorted({m for held in gone.values() for m in held})
    return (
        f"{len(gone)} of {len(holders)} shards have no living holder ({_some(sorted(gone))}; held by "
        f"{_some(lost_holders)}): start again from a durable checkpoint, and use more backups against such losses"
    )


def redundancy(holders: HoldersByShard, alive: Collection[str], backups: int, no_room: Collection[str] = ()) -> str:
    """Return, in words for the operator, how many more losses each shard survives; empty if no holders are known.

    Adds "copying" if there are fewer copies than the living members could hold: these copies are being made. Names the
    members with `no_room` for them instead, if there are any.
    """
    if not holders or not alive:
        return ""
    # The weakest shard decides: the job ends when one shard has no holder.
    spare = min(len(set(held) & set(alive)) for held in holders.values()) - 1
    if spare < 0:
        return "some shards have no living holder"
    words = f"every shard survives the loss of {spare} more" if spare else "some shards are held by one member only"
    if spare >= min(backups, len(alive) - 1):
        return words
    return words + (f", and {', '.join(sorted(no_room))} have no room for more copies" if no_room else ", copying")


def may_restart(*, exit_code: int, finishing: bool, refused: bool, used: int, allowed: int, barred: str = "") -> Ruling:
    """Decide whether a worker that ended is started again. `exit_code` < 0 is minus the signal that ended it.

    `barred`: why no worker may be started in its place, or "".
    """
    # In the order of importance of the reasons for an operator.
    if refused:
        return Ruling(yes=False, reason="it was refused; the same worker would be refused again")
    if exit_code == 0:
        return Ruling(yes=False, reason="its script ended by itself")
    if finishing:
        return Ruling(yes=False, reason="the job is finishing")
    if barred:
        return Ruling(yes=False, reason=barred)
    if not allowed:
        return Ruling(yes=False, reason="this job replaces no workers (--max-restarts 0)")
    if used >= allowed:
        return Ruling(yes=False, reason=f"all {allowed} restarts are used up (--max-restarts)")
    return Ruling(yes=True, reason=f"restart {used + 1} of {allowed}")


def spec_difference(expected: Mapping[str, object], came: Mapping[str, object], *, late: bool = False) -> str:
    """Return a sentence about the first setting that differs, with both values and advice; empty if all are equal.

    `late`: True for a member that joins a running job, whose loaded state does not count.
    """
    # Sorted, so that every agent names the same one.
    names = (name for name in {*expected, *came} if not (is_taken_over(name) or (late and name == LOADED)))
    for key in sorted(names, key=lambda name: (name not in OF_THE_DEVICE, name)):
        ours, theirs = expected.get(key, "(unset)"), came.get(key, "(unset)")
        if ours != theirs:
            return f"its {key} is {theirs}, the job's is {ours}: {_what_to_do(key)}"
    return ""


_SAME_MACHINES = (
    "start every worker on the same kind of processor, with the same libraries and the same ATEN_CPU_CAPABILITY, "
    "ONEDNN_MAX_CPU_ISA and MKL_CBWR in its environment (elastrain.init(deterministic=False) lets such workers in)"
)
_SAME_DEVICES = (
    "start every worker on the same kind of device, with the same libraries (elastrain.init(deterministic=False) lets "
    "workers in whose devices are of one capability and have the same device runtime)"
)
# Only for settings whose own name does not say what to change.
_ADVICE = {
    "device ": _SAME_DEVICES,
    "device's": _SAME_DEVICES,
    "device": "give every worker a device of the same kind (a driver, torch built for it, CUDA_VISIBLE_DEVICES), or "
    "train on the CPU everywhere",
    "CPU model": _SAME_MACHINES,
    "result of a fixed": _SAME_MACHINES,
    OWN: "name a checkpoint of the script's own that all members find",
    "hash of a word": "start every worker with the same PYTHONHASHSEED, which decides the order of sets",
}
"""Prefix of a setting's name -> advice for the user."""


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
    """Propose a view without one member if living members do not reach one another.

    The removed member is one that suspects or is suspected. If members that hold state suspect each other, it is one of
    these. A member whose end would leave a shard without a holder stays, unless that is so for all. The most suspected
    member goes first; among equals, a newcomer before a holder, then the later one in the view.

    Args:
        view: the present view.
        suspicions: member -> the members that suspect it.
        holders: the holders of each shard.
        answering: members that are not proven dead, on nodes whose agents answer. Suspicions of and about others are
            ignored.
        begun: True if a step may have been committed.
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
        # A newcomer has just opened its links, and may itself be at fault. So its suspicion has half the weight, and
        # none against a holder that no other holder suspects. (It once ended the only member that had the state.)
        firm = len(words[member] & keep)
        votes = 2 * firm + len(words[member] - keep)
        return (votes if firm or member not in keep else 0), member not in keep, view.ids.index(member)

    fit = [m for m in parties if not missing_state(holders, set(here) - {m})]
    member = max(fit or parties, key=rank)
    by = [m for m in here if m in words[member]]
    others = [m for m in here if member in words[m]]
    how = f"{_some(by)} cannot reach it" if by else f"it cannot reach {_some(others)}"
    what = "it is ended" if fit else "it is ended, though each of them holds state that no other member holds"
    # The next view is the same as after the member's death. The member learns from it that it has to end.
    proposal = _without(view, [member], (), begun=begun or view.begun)
    return replace(proposal, reason=f"{member} lives, but {how}: {what}")


def with_new_links(view: View, suspect: Proposal) -> Proposal:
    """Propose the same members with new links, instead of one member less. No member is dead, so new links may work.

    Agents try this first, and once. If the links fail again, a member has to go.
    """
    reason = f"{suspect.reason.partition(':')[0]}: all links between nodes are made anew"
    generation = view.generation + 1
    begun = suspect.view.begun if suspect.view is not None else view.begun
    renewed = replace(view, generation=generation, reason=reason, begun=begun, links_since=generation)
    return Proposal(outcome=Outcome.CHANGE, reason=reason, view=renewed)


def with_step_anew(view: View, proposed: View | None, reason: str) -> View:
    """Return the next view as one in which the open step starts again.

    proposed: the next view for other reasons, if any; its changes are kept.
    """
    generation = view.generation + 1
    if proposed is None:
        return replace(view, generation=generation, reason=f"step anew: {reason}", anew_since=generation)
    return replace(proposed, reason=f"{proposed.reason}; step anew: {reason}", anew_since=generation)


def _parties(words: Mapping[str, Collection[str]]) -> set[str]:
    """Return the members that suspect another, or are suspected."""
    return {m for m, by in words.items() if by} | {m for by in words.values() for m in by}


def _without(view: View, gone: Sequence[str], newcomers: Sequence[Member], *, begun: bool) -> Proposal:
    # The ranks of those that stay keep their order, and newcomers come last, so that the plan changes little.
    rest = tuple(m for m in view.members if m.id not in gone)
    # Newcomers alone may begin a job but not continue one: the state died with the last member that had it.
    if not rest and not (newcomers and not begun):
        return Proposal(outcome=Outcome.LOST, reason=NOBODY_LEFT)
    # In the order of an operator's questions: first the losses, then the newcomers.
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
    """Return why the remaining members may not go on alone; empty if they may."""
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
