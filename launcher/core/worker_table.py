"""A worker's life as the agent sees it, as one table: (stage, what happens) -> stage.

What has no entry leaves the stage as it is: a worker that says things out of turn must not end its agent.

This node's workers as its agent sees them, those that are gone too, and the places that wait for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from elastrain.protocol.agent_messages import Progress


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


@dataclass(kw_only=True)
class WorkerProgress:
    """How far a worker is, by its own words."""

    step: int | None = None
    """The newest step that it has committed."""
    holders: Mapping[str, Sequence[str]] | None = None
    """Who holds what: it says so with its first commit, and whenever that changes."""
    phase: str = ""
    redone_steps: int = 0

    def take(self, message: Progress) -> None:
        if self.step is not None and message.step <= self.step:
            self.redone_steps += self.step - message.step + 1
        self.step, self.phase = message.step, ""
        self.holders = message.holders if message.holders is not None else self.holders


@dataclass(kw_only=True)
class Worker:
    """One worker process."""

    id: str
    slot: int
    initial: bool
    """It was started before there was a view: the job cannot begin without it."""
    started_s: float = 0.0
    """When, monotonic."""
    replaces: str = ""
    """The member whose place it took."""
    stage: Stage = Stage.STARTING
    address: str = ""
    pid: int | None = None
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    exit_code: int | None = None
    digest: str | None = None
    """Of the parameters with which it has passed the end of the job; empty where it has a part of them only."""
    raised: bool = False
    """By an exception in its loop: other nodes wait for the digest, and are told it once the process has ended well."""

    @property
    def alive(self) -> bool:
        return self.stage not in DEAD

    @property
    def finished(self) -> bool:
        return self.stage in DONE

    @property
    def state(self) -> str:
        """The stage in words for people, to whom a newcomer is a member like the others."""
        return "finished" if self.finished else "member" if self.stage is Stage.NEWCOMER else str(self.stage)

    def follow(self, course: Course) -> None:
        self.stage = follow(self.stage, course)


@dataclass(frozen=True, kw_only=True)
class Vacancy:
    """A place for which a number is on its way."""

    slot: int
    of: str = ""
    """The member that had it."""


class Workers:
    """This node's workers, in the order in which they were started."""

    def __init__(self) -> None:
        self.by_id: dict[str, Worker] = {}
        self.vacancies: deque[Vacancy] = deque()
        self.restarts = 0
        self.uncounted: set[str] = set()
        """Members whose replacement uses up no restart."""
        self.restarts_used = 0
        """Those that still count."""

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.by_id.values() if worker.alive]

    @property
    def joiners(self) -> list[Worker]:
        """The workers that are ready and in no view."""
        return [worker for worker in self.by_id.values() if worker.stage is Stage.READY]

    @property
    def all_are_ready(self) -> bool:
        """Whether all workers that this node has left are ready, for the first view."""
        return bool(self.living) and not self.vacancies and all(w.stage is Stage.READY for w in self.living)

    @property
    def steps_lost(self) -> int:
        """How many committed steps some worker had to commit again."""
        return max((worker.progress.redone_steps for worker in self.by_id.values()), default=0)

    def restart(self, worker: Worker, *, counts: bool) -> None:
        """Note that another worker is to take the place of this one."""
        self.restarts += 1
        self.restarts_used += counts
        if not counts:
            self.uncounted.add(worker.id)
        self.vacancies.append(Vacancy(slot=worker.slot, of=worker.id))
