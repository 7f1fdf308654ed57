"""Lives of a job: whether another begins where one has lost everything, and from where.

A life is the job from one start of its workers to their end. The first begins as the command says; each later one goes
on from a durable checkpoint, with a roster and keys of its own. Values in, values out: no store, no disk, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from elastrain.launcher.values import End, Life

BARREN_MAX = 3
"""Lives in a row that may end without a newer checkpoint than the one they began with."""


@dataclass(frozen=True, kw_only=True)
class Following:
    """The life that begins, or None where the job ends; and why, in a clause for the screen and the event log."""

    life: Life | None
    reason: str


def next_life(life: Life, end: End, *, newest_step: int | None, first_member: int) -> Following:
    """Decide whether another life follows upon `life`, which has ended with `end`.

    newest_step: of the newest complete checkpoint; None where there is none.
    first_member: the first number of a member that no life has used.
    """
    if not end.lost:
        return Following(life=None, reason="the job has not lost its state")
    if newest_step is None:
        return Following(life=None, reason="there is no complete checkpoint to go back to yet")
    # What ends each life before its first checkpoint (the script, or every machine there is) would end all that follow.
    barren = life.barren + 1 if life.number > 1 and newest_step <= life.step else 0
    if barren >= BARREN_MAX:
        return Following(life=None, reason=_why_no_more(newest_step))
    later = replace(
        life, number=life.number + 1, step=newest_step, barren=barren, first_member=max(first_member, life.first_member)
    )
    return Following(life=later, reason=f"life {later.number} begins, and reads the checkpoint of step {newest_step}")


def _why_no_more(step: int) -> str:
    return (
        f"{BARREN_MAX} lives in a row came no further than the checkpoint of step {step}: look at what ended them "
        "before you start the job again"
    )


def last_end(end: End, following: Following) -> End:
    """The end of the job, where no life follows upon one that has lost its state: the operator reads why."""
    if following.life is not None or not end.lost:
        return end
    return msgspec.structs.replace(end, sentence=f"{end.sentence}; {following.reason}")
