"""Judges which of two members is wrong, where both must agree to the bit and do not. Each verdict has its reason.

Whoever is wrong lets go of what it has, and the step begins anew with what the other one has
(`member/integrity/repair.py`).
Where nobody can tell, the job ends on all nodes: going on would break the promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A shard's state after `step` has the digest `told` at its primary, and `found` at its backup `member`."""

    shard: int
    step: int
    member: str
    primary: str
    told: int
    found: int

    def __str__(self) -> str:
        return (
            f"the state of shard {self.shard} after step {self.step} differs between its primary {self.primary} and "
            f"its backup {self.member}"
        )


class Side(Enum):
    """Who is wrong."""

    NOBODY = "nobody any more"
    MEMBER = "the member that asked"
    PRIMARY = "the primary"
    UNKNOWN = "one of the two"


@dataclass(frozen=True)
class Verdict:
    wrong: Side
    reason: str


def look_again(
    difference: Difference, *, verified: int | None, verified_now: int, has_gradient: bool, found_now: int
) -> Verdict | None:
    """Judge by what the backup can find out alone; None if others have to be asked.

    verified: the digest of its state before the step, as it was compared with the primary's; None if it never was.
    verified_now: the digest of the same state now.
    has_gradient: the gradient that it keeps is still what its primary had.
    found_now: the digest of the update, made again from that state.
    """
    d = difference
    # The backup looks at itself first: that costs no message, and a fault of its own must not end the job.
    changed = _changed_here(d.member, verified, verified_now, has_gradient)
    if changed:
        return Verdict(Side.MEMBER, f"{d}: {changed}")
    # What differed is gone: a replacement would cost a member and mend nothing.
    if found_now == d.told:
        return Verdict(Side.NOBODY, f"{d}, but computed again it is equal: {d.member} had a passing fault")
    # Neither of its two results can be trusted, so that a third copy would decide nothing about the primary.
    if found_now != d.found:
        return Verdict(Side.MEMBER, f"{d}: {d.member} computes the same update with another result each time")
    return None


def _changed_here(member: str, verified: int | None, verified_now: int, has_gradient: bool) -> str:
    """What of that from which an update is made is no more as it was; empty if all of it is."""
    # Where nothing was ever compared, nothing is known to have changed.
    if verified is not None and verified_now != verified:
        return f"what {member} keeps has changed in its memory since it was verified"
    if not has_gradient:
        return f"the gradient that {member} keeps has changed in its memory since it came"
    return ""


def look_before_taking_over(
    *, shard: int, step: int, member: str, verified: int | None, verified_now: int, has_gradient: bool
) -> str:
    """Say why a `member` that has become a shard's primary must not be it; empty if nothing speaks against it.

    verified: the digest of the state that it takes over with, as it was compared with the lost primary's; None if it
    never was. verified_now: the digest of the same state now. has_gradient: as in `look_again`.
    """
    changed = _changed_here(member, verified, verified_now, has_gradient)
    return f"{member} was to take over shard {shard} after step {step}: {changed}" if changed else ""


def judge(difference: Difference, answers: Mapping[str, int | None]) -> Verdict:
    """Judge by what the others have: a third copy decides between the two.

    answers: member -> digest of the shard's state after the step as it is there now; None where it has none.
    """
    d = difference
    # Without a third copy, a primary that no longer has what it told is known to be wrong all the same.
    now = answers.get(d.primary)
    if now is not None and now != d.told:
        return Verdict(Side.PRIMARY, f"{d}: it has changed in the memory of {d.primary} since then")
    # The primary's own word is no third copy: it told it before.
    third = {member: digest for member, digest in answers.items() if member != d.primary}
    with_me = sorted(member for member, digest in third.items() if digest == d.found)
    with_primary = sorted(member for member, digest in third.items() if digest == d.told)
    # Only where all third copies say the same: two that differ prove a fault, but not whose.
    if with_me and not with_primary:
        reason = f"{', '.join(with_me)} has what {d.member} has: {d.primary} is wrong, and has published it"
        return Verdict(Side.PRIMARY, f"{d}; {reason}")
    if with_primary and not with_me:
        return Verdict(Side.MEMBER, f"{d}, and {', '.join(with_primary)} has what {d.primary} has: {d.member} is wrong")
    return Verdict(Side.UNKNOWN, f"{d}: no third copy tells which of the two is wrong")


def judge_trial(difference: Difference, made: int | None) -> Verdict:
    """Judge by what the primary makes of the backup's state before the step and its gradient.

    made: the digest of that update, computed by the primary; None where what came was not what the primary had then.
    """
    d = difference
    again = f"{d.primary} has made the update again, from what both had before"
    # Of another beginning, the result would say nothing about either.
    if made is None:
        reason = f"what {d.member} has sent of the step before is not what {d.primary} had then"
        return Verdict(Side.UNKNOWN, f"{d}: {reason}")
    # Two machines have made the same of it: what differs is what one of them had in its memory.
    if made == d.found:
        return Verdict(Side.PRIMARY, f"{d}: {again}, and gets what {d.member} has: its own was wrong in its memory")
    if made == d.told:
        return Verdict(Side.MEMBER, f"{d}: {again}, and gets what it had: {d.member} computes wrongly")
    return Verdict(Side.UNKNOWN, f"{d}: {again}, and gets a third result")


def judge_copy(*, shard: int, step: int, receiver: str, sender: str, told: int, now: int | None) -> Verdict:
    """Judge a copy that came twice with another digest than `told`; `now` is that of the sender's state, made again."""
    # Twice, because a copy that is damaged once may have had bad luck on its way: it is asked for again.
    copy = f"the copy of shard {shard} after step {step} came twice from {sender} to {receiver} with other content"
    # `now` is read from the state itself: a digest that was kept beside it could not show a change.
    if now == told:
        return Verdict(Side.MEMBER, f"{copy}; {sender} has it unchanged: {receiver} is wrong")
    return Verdict(Side.PRIMARY, f"{copy}: it has changed in the memory of {sender}")


def judge_parameters(*, shard: int, step: int, member: str, publisher: str, told: int, now: int | None) -> Verdict:
    """Judge a `member` that computes with other parameters than `publisher` published with the digest `told`.

    now: the digest of what the publisher has at present. Whoever is wrong, the step begins anew: gradients that were
    computed with the wrong parameters may be in other members' sums already.
    """
    # A publisher that no longer has what it published has convicted itself, whoever noticed.
    if member == publisher or now != told:
        return Verdict(
            Side.PRIMARY,
            f"the parameters of shard {shard} have changed in the memory of {publisher}, its primary, since they were "
            f"published after step {step}",
        )
    return Verdict(
        Side.MEMBER,
        f"{member} computes with other parameters of shard {shard} than {publisher} published after step {step} (and "
        f"still has): they have changed in the memory of {member} or on the way there",
    )


def changed_since(*, shard: int, step: int, member: str) -> str:
    """Say that a `member` has no more what it has told of a shard."""
    return f"what {member} has of shard {shard} after step {step} has changed in its memory since it was told"


def other_primary(*, shard: int, step: int, member: str) -> str:
    """Say that a `member` has become a shard's primary, and its state is not what the last primary published."""
    return (
        f"the parameters of shard {shard} that its last primary published after step {step} are not those of the "
        f"verified state at {member}"
    )
