"""This node's workers as its agent sees them, those that are gone too, and the places that wait for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastrain.agent_messages import Progress
from elastrain.launcher.core.stages import DEAD, DONE, Course, Stage, follow


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
