"""A worker's life as the agent sees it, as one table: (stage, what happens) -> stage.

What has no entry leaves the stage as it is: a worker that says things out of turn must not end its agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum, auto


class Stage(StrEnum):
    """A stage of a worker's life."""

    STARTING = "starting"
    REFUSED = "refused"
    """It does not fit the job, and a replacement with the same script would not fit either."""
    READY = "ready"
    NEWCOMER = "newcomer"
    """A member that came later and has not committed a step yet: it computes at a higher priority than the others."""
    MEMBER = "member"
    LEFT_OUT = "left out"
    """A member that a view has left out while it lived: it ends by itself, with an error, when it hears of that."""
    OVERDUE = "overdue"
    """A member that should have ended by itself: it is killed, its work unfinished."""
    FINISHED = "finished"
    DISMISSED = "dismissed"
    """It has finished, did not end by itself, and is killed: no harm is done."""
    SURPLUS = "surplus"
    """It is killed because the job is over and it has nothing left to join."""
    # Those below are gone; what they were decides what their exit code means.
    GONE = "gone"
    EVICTED = "evicted"
    TURNED_AWAY = "turned away"
    LEFT = "left"
    DROPPED = "dropped"


class Course(Enum):
    """What moves a worker on."""

    FIT = auto()
    """Its hello is as the job wants it."""
    UNFIT = auto()
    ENTER_AT_FIRST = auto()
    """It is in a view, and was started before there was one."""
    ENTER_LATER = auto()
    COMMIT = auto()
    BE_LEFT_OUT = auto()
    FINISH = auto()
    BE_LATE = auto()
    """It has not ended in time."""
    BE_SURPLUS = auto()
    DIE = auto()


_S, _C = Stage, Course
TABLE: Mapping[tuple[Stage, Course], Stage] = {
    (_S.STARTING, _C.FIT): _S.READY,
    (_S.STARTING, _C.UNFIT): _S.REFUSED,
    (_S.READY, _C.ENTER_AT_FIRST): _S.MEMBER,
    (_S.READY, _C.ENTER_LATER): _S.NEWCOMER,
    (_S.NEWCOMER, _C.COMMIT): _S.MEMBER,
    **{(s, _C.FINISH): _S.FINISHED for s in (_S.STARTING, _S.REFUSED, _S.READY, _S.NEWCOMER, _S.MEMBER)},
    # It was about to be killed when it said so: how its process ends means nothing any more.
    (_S.OVERDUE, _C.FINISH): _S.DISMISSED,
    (_S.GONE, _C.FINISH): _S.LEFT,
    (_S.NEWCOMER, _C.BE_LEFT_OUT): _S.LEFT_OUT,
    (_S.MEMBER, _C.BE_LEFT_OUT): _S.LEFT_OUT,
    (_S.LEFT_OUT, _C.FINISH): _S.FINISHED,
    (_S.LEFT_OUT, _C.BE_LATE): _S.OVERDUE,
    (_S.LEFT_OUT, _C.BE_SURPLUS): _S.SURPLUS,
    (_S.LEFT_OUT, _C.DIE): _S.EVICTED,
    (_S.EVICTED, _C.FINISH): _S.LEFT,
    (_S.NEWCOMER, _C.BE_LATE): _S.OVERDUE,
    (_S.MEMBER, _C.BE_LATE): _S.OVERDUE,
    (_S.FINISHED, _C.BE_LATE): _S.DISMISSED,
    **{(s, _C.BE_SURPLUS): _S.SURPLUS for s in (_S.STARTING, _S.REFUSED, _S.READY, _S.NEWCOMER, _S.MEMBER, _S.OVERDUE)},
    **{(s, _C.DIE): _S.GONE for s in (_S.STARTING, _S.READY, _S.NEWCOMER, _S.MEMBER, _S.OVERDUE)},
    (_S.REFUSED, _C.DIE): _S.TURNED_AWAY,
    (_S.FINISHED, _C.DIE): _S.LEFT,
    (_S.DISMISSED, _C.DIE): _S.DROPPED,
    (_S.SURPLUS, _C.DIE): _S.DROPPED,
}
DEAD = frozenset({Stage.GONE, Stage.EVICTED, Stage.TURNED_AWAY, Stage.LEFT, Stage.DROPPED})
DONE = frozenset({Stage.FINISHED, Stage.DISMISSED, Stage.LEFT})
"""It has passed the end of the job."""
IN_A_VIEW = frozenset({Stage.NEWCOMER, Stage.MEMBER, Stage.LEFT_OUT, Stage.OVERDUE, Stage.FINISHED, Stage.DISMISSED})
"""It has been told of a view, and is told of later ones."""


def follow(stage: Stage, course: Course) -> Stage:
    return TABLE.get((stage, course), stage)
