"""Workers of this node, living and gone, and the table of a worker's stages: (stage, course) -> next stage.

An event without an entry leaves the stage unchanged, because a worker with unexpected messages must not crash its
agent.
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
    """The worker does not fit the job, and a replacement with the same script would not fit either."""
    READY = "ready"
    NEWCOMER = "newcomer"
    """A member that joined later and has not committed a step yet. It computes at a higher priority than the others."""
    MEMBER = "member"
    LEFT_OUT = "left out"
    """A living member that the newest view does not contain. It exits with an error when it hears of that."""
    OVERDUE = "overdue"
    """A member that has not exited in time. It is killed with its work unfinished."""
    FINISHED = "finished"
    DISMISSED = "dismissed"
    """A member that has finished but not exited in time. It is killed, which does no harm."""
    SURPLUS = "surplus"
    """A worker that is killed because the job is over and it cannot join any more."""
    # The following stages are those of dead workers. They decide what the exit code means.
    GONE = "gone"
    EVICTED = "evicted"
    TURNED_AWAY = "turned away"
    LEFT = "left"
    DROPPED = "dropped"


class Course(Enum):
    """An event that moves a worker to another stage."""

    FIT = auto()
    """The worker's hello fits the job."""
    UNFIT = auto()
    ENTER_AT_FIRST = auto()
    """The worker is in a view, and was started before the first one."""
    ENTER_LATER = auto()
    COMMIT = auto()
    BE_LEFT_OUT = auto()
    FINISH = auto()
    BE_LATE = auto()
    """The worker has not exited in time."""
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
    # The worker reported this while it was about to be killed. Its exit code means nothing any more.
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
"""Stages of workers that have passed the end of the job."""
IN_A_VIEW = frozenset({Stage.NEWCOMER, Stage.MEMBER, Stage.LEFT_OUT, Stage.OVERDUE, Stage.FINISHED, Stage.DISMISSED})
"""Stages of workers that were told of a view. They are told of later ones too."""


def follow(stage: Stage, course: Course) -> Stage:
    """Return the next stage. Without an entry in the table it is the same one."""
    return TABLE.get((stage, course), stage)


@dataclass(kw_only=True)
class WorkerProgress:
    """Progress of a worker, by its own reports."""

    step: int | None = None
    """The newest step that the worker has committed."""
    holders: Mapping[str, Sequence[str]] | None = None
    """Holders of each shard. Reported with the worker's first commit and after each change."""
    waits_for: str = ""
    """Why the worker does not pass the open step; "" if it has not told, or has passed that step since."""
    redone_steps: int = 0

    def wait(self, reason: str) -> None:
        """Note why the worker does not pass its open step."""
        self.waits_for = reason

    def take(self, message: Progress) -> None:
        """Update from a report. The steps from a repeated one to the newest count as redone."""
        if self.step is not None and message.step <= self.step:
            self.redone_steps += self.step - message.step + 1
        self.step, self.waits_for = message.step, ""
        self.holders = message.holders if message.holders is not None else self.holders


@dataclass(kw_only=True)
class Worker:
    """A worker process."""

    id: str
    slot: int
    initial: bool
    """True if it was started before the first view. The job cannot begin without it."""
    started_s: float = 0.0
    """Monotonic start time."""
    replaces: str = ""
    """The member that this worker replaces, or ""."""
    stage: Stage = Stage.STARTING
    address: str = ""
    pid: int | None = None
    progress: WorkerProgress = field(default_factory=WorkerProgress)
    exit_code: int | None = None
    digest: str | None = None
    """Digest of the final parameters. Empty if the worker has only a part of them, None before the end."""
    raised: bool = False
    """True if the loop ended with an exception. Other nodes get the digest only after the process has exited well."""

    @property
    def alive(self) -> bool:
        """True unless the process is known to be dead."""
        return self.stage not in DEAD

    @property
    def finished(self) -> bool:
        """True if the worker has passed the end of the job."""
        return self.stage in DONE

    @property
    def state(self) -> str:
        """The stage in words for people. A newcomer is shown as a member."""
        return "finished" if self.finished else "member" if self.stage is Stage.NEWCOMER else str(self.stage)

    def follow(self, course: Course) -> None:
        """Move to the next stage."""
        self.stage = follow(self.stage, course)

    def run_as(self, pid: int) -> None:
        """Record the process id."""
        self.pid = pid

    def fit(self, address: str) -> None:
        """Become ready for a view, at this address of the mesh."""
        self.follow(Course.FIT)
        self.address = address

    def finish(self, digest: str, *, raised: bool) -> None:
        """Pass the end of the job, with the digest of the final parameters."""
        self.follow(Course.FINISH)
        self.digest, self.raised = digest, raised

    def exit(self, exit_code: int) -> None:
        """Record the exit code of the process."""
        self.exit_code = exit_code

    def release_digest(self) -> bool:
        """Let other nodes have the digest, because the process has exited well. Returns True if it was held back."""
        was_held, self.raised = self.raised, False
        return was_held


@dataclass(frozen=True, kw_only=True)
class Vacancy:
    """A slot that waits for the number of a new member."""

    slot: int
    of: str = ""
    """The member that had the slot, or ""."""


class Workers:
    """Workers of this node in the order of their start."""

    def __init__(self) -> None:
        self.by_id: dict[str, Worker] = {}
        self.vacancies: deque[Vacancy] = deque()
        self.restarts = 0
        self.uncounted: set[str] = set()
        """Members whose replacements do not count against the restart limit."""
        self.restarts_used = 0
        """Restarts that count against the limit now."""
        self.handle_losses = False
        """True once one of them has opened its channel to the agent: scripts with `job.steps` or `surviving` do."""

    @property
    def living(self) -> list[Worker]:
        """The workers that are not dead."""
        return [worker for worker in self.by_id.values() if worker.alive]

    @property
    def joiners(self) -> list[Worker]:
        """The workers that are ready and not in a view."""
        return [worker for worker in self.by_id.values() if worker.stage is Stage.READY]

    @property
    def all_are_ready(self) -> bool:
        """True if all living workers are ready for the first view, and no vacancy is open."""
        return bool(self.living) and not self.vacancies and all(w.stage is Stage.READY for w in self.living)

    @property
    def steps_lost(self) -> int:
        """Largest number of committed steps that one worker had to commit again."""
        return max((worker.progress.redone_steps for worker in self.by_id.values()), default=0)

    def add(self, worker: Worker) -> None:
        """Add a worker that is being started."""
        self.by_id[worker.id] = worker

    def connect(self) -> None:
        """Record that a worker has opened its channel."""
        self.handle_losses = True

    def open_slots(self, count: int) -> None:
        """Open vacancies in the first `count` slots."""
        self.vacancies.extend(Vacancy(slot=slot) for slot in range(count))

    def fill_vacancy(self) -> Vacancy | None:
        """Take the vacancy that waits longest, or return None."""
        return self.vacancies.popleft() if self.vacancies else None

    def start_no_more(self) -> None:
        """Drop all vacancies."""
        self.vacancies.clear()

    def forget_restart(self) -> None:
        """Stop counting one restart against the limit."""
        self.restarts_used -= 1

    def restart(self, worker: Worker, *, counts: bool) -> None:
        """Note that this worker is to be replaced. `counts`: against the restart limit."""
        self.restarts += 1
        self.restarts_used += counts
        if not counts:
            self.uncounted.add(worker.id)
        self.vacancies.append(Vacancy(slot=worker.slot, of=worker.id))
