"""Progress of the job as this agent has heard: steps and their pace, checkpoints, missing redundancy, failed devices.

`JobProgress` also keeps the newest reasons for what happened, which `status` shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from elastrain.base.thread_status import Station
from elastrain.base.told_devices import ToldDevices
from elastrain.decisions.blame import Failure, left_out, nothing_left, objection, times_failed
from elastrain.launcher.core.agent_events import AgentPart, CheckpointAnswered
from elastrain.launcher.core.watching.recent_reasons import RecentReasons
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, Log, PutCheckpoint, Tell
from elastrain.protocol import agent_messages as am
from elastrain.protocol.handlers import handles


class JobProgress(AgentPart):
    """Progress of the job. Only committed steps count."""

    def __init__(self) -> None:
        self.due = False
        """True if the first commit may have been made on any node, even if no report of it has come."""
        self.to_commit: set[str] = set()
        """Members of this node that wait with the first commit until the store has recorded that it is due."""
        self.begun = False
        """True if a step has been committed on any node."""
        self.step: int | None = None
        self.loss: float | None = None
        self.samples: int | None = None
        self.redone_pairs = 0
        """Number of (block, run) pairs that pipelines have computed again after losses."""
        self.plan: dict[str, Any] = {}
        """The plan of pipelines, its first step, the last decision about plans, and speeds. Empty without pipelines."""
        self._redone_in = 0
        self._step_at_new_links: int | None = None
        self.recent = RecentReasons()

    def note_new_links(self) -> None:
        """Record that the members are making all links between their nodes anew."""
        self._step_at_new_links = self.step

    @property
    def is_as_with_new_links(self) -> bool:
        """True if no step has been committed since the links were made anew."""
        return self.step == self._step_at_new_links

    def begin(self) -> None:
        """Record that a step has been committed on a node."""
        self.begun = True

    def let_commit_first(self) -> set[str]:
        """Record that the first commit may be made. Returns the members of this node that have waited for that."""
        self.due, waiting, self.to_commit = True, self.to_commit, set()
        return waiting

    def wait_to_commit(self, member: str) -> bool:
        """Record a member of this node that waits with the first commit. Returns True if no other one waits."""
        self.to_commit.add(member)
        return len(self.to_commit) == 1

    def take(self, message: am.Progress) -> None:
        """Take over the report of a step if it is newer."""
        if self.step is None or message.step > self.step:
            self.step, self.loss, self.samples = message.step, message.loss, message.samples

    @handles(am.Redone)
    def redo(self, message: am.Redone) -> list[Command]:
        """Count the pairs that are computed again. Each view counts once, although all its members report it."""
        if message.generation <= self._redone_in:
            return []
        self._redone_in = message.generation
        self.redone_pairs += message.pairs
        return [Log(event="redone", fields={"step": message.step, "pairs": message.pairs})]

    @handles(am.PlanTold)
    def on_plan(self, message: am.PlanTold) -> list[Command]:
        """Note a plan of pipelines, or a decision about it. All members report the same plan."""
        # The planner's reason comes from one member, before its plan is in force. "" does not overwrite it.
        is_new = message.step is not None and message.step != self.plan.get("step")
        told: dict[str, Any] = {"step": message.step, "pipelines": message.pipelines} if is_new else {}
        told |= {"reason": message.reason} if message.reason else {}
        told |= {"speeds": message.speeds} if message.speeds else {}
        self.plan = {"step": 0, "pipelines": (), "reason": "", "speeds": {}} | self.plan | told
        return [Log(event="plan", fields=told)] if is_new else []

    def explain(self, reason: str) -> None:
        """Add a reason for `status`. The oldest ones are dropped."""
        self.recent.add(reason)


class FinalDigests:
    """The final parameter digests of all members. A job whose members differ at the end has no valid result."""

    def __init__(self) -> None:
        self._by_member: dict[str, str] = {}

    def add(self, member: str, digest: str) -> str:
        """Add a digest ("": only a part of the parameters is there). Returns an error text if two differ, else ""."""
        known = self._by_member
        known[member] = digest
        other = next((m for m, its in known.items() if its != digest and its and digest), None)
        if other is None:
            return ""
        return (
            f"the parameters at the end differ: {other} has the digest {known[other]}, {member} has {digest}; "
            "neither can be trusted: something outside of the optimizer has changed them on one member, or a device "
            "computes wrongly"
        )

    def missing(self, members: Sequence[str]) -> list[str]:
        """Return those of the members whose digests are not known yet."""
        return [member for member in members if member not in self._by_member]


class CheckpointCare(AgentPart):
    """Durable checkpoints, as far as this agent knows.

    Members write them, and the store decides which one is visible.
    """

    def __init__(self, life: int, progress: JobProgress) -> None:
        self._life, self._progress = life, progress
        self.newest: am.CheckpointEnded | None = None
        """Newest complete checkpoint that this agent has heard of."""
        self._newest_s = 0.0

    def ago_s(self, now: float) -> float | None:
        """Return the age of the newest checkpoint in seconds, or None if there is none."""
        return None if self.newest is None else max(0.0, now - self._newest_s)

    @handles(am.CheckpointReady)
    def on_ready(self, worker: Worker, message: am.CheckpointReady) -> list[Command]:
        """Ask the store to make a complete checkpoint visible.

        The store knows whether the member still belongs to the job.
        """
        return [PutCheckpoint(member=worker.id, step=message.step, name=message.name, life=self._life)]

    @handles(CheckpointAnswered)
    def on_answered(self, event: CheckpointAnswered) -> list[Command]:
        """Give the store's answer about a checkpoint to the member that collected it."""
        return [Tell(member=event.member, message=am.CheckpointSettled(step=event.step, problem=event.problem))]

    def on_ended(self, message: am.CheckpointEnded) -> list[Command]:
        """Handle the end of a checkpoint, as reported by the member that collected it."""
        step = message.step
        if message.reason:
            say = f"the checkpoint of step {step} is given up, because {message.reason}"
            self._progress.explain(say)
        else:
            self.newest, self._newest_s = message, self._progress.recent.now_s
            say = f"the checkpoint of step {step} is complete: {message.took_s:.1f} s, {_size(message.size_bytes)}"
        fields = {"step": step, "reason": message.reason, "took_s": message.took_s, "size_bytes": message.size_bytes}
        return [Log(event="checkpoint", fields=fields, say=say)]


def _size(size_bytes: int) -> str:
    """Return a size in words, with one decimal from 1 kB on."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"


class OpenWindow(AgentPart):
    """The open window: shards with fewer living holders than they should have.

    All members report it sooner or later.
    """

    def __init__(self) -> None:
        self.short: Mapping[str, int] = {}
        """Shard -> number of its living holders."""
        self.since_step: int | None = None
        self.since_s: float | None = None
        """Monotonic time when this agent heard of the window. None while the window is closed."""
        self._no_room: dict[str, tuple[str, ...]] = {}
        """Worker -> the members that have no room for copies of its shards."""
        self._step = -1

    @handles(am.Window)
    def on_window(self, worker: Worker, message: am.Window, now: float) -> list[Command]:
        """Update from a member's report. Returns a line for the event log if the window has opened or closed."""
        # A slow member may report an earlier step that another member has reported already.
        if message.step < self._step:
            return []
        was_open = self.since_s is not None
        self._step, self.short = message.step, message.short
        self._no_room[worker.id] = message.no_room if message.short else ()
        if message.short:
            self.since_step = message.since_step
            self.since_s = now if self.since_s is None else self.since_s
            return [] if was_open else [self._log(worker.id, "opened", shards=len(message.short), step=message.step)]
        since_s, self.since_s = self.since_s, None
        self._no_room.clear()
        # The count of steps starts at the loss and includes the step that was open then.
        steps = message.step - (self.since_step if self.since_step is not None else message.step)
        return [] if since_s is None else [self._log(worker.id, "closed", after_s=now - since_s, after_steps=steps)]

    @property
    def no_room(self) -> tuple[str, ...]:
        """The members that have no room for copies: while they stay, the window stays open."""
        return tuple(sorted({member for members in self._no_room.values() for member in members}))

    def described(self, now: float) -> dict[str, object] | None:
        """Return the open window for `status`, or None if every shard has all its holders."""
        if self.since_s is None:
            return None
        no_room = {"no_room": self.no_room} if self.no_room else {}
        return {"shards": dict(self.short), "since_step": self.since_step, "since_s": now - self.since_s, **no_room}

    def _log(self, member: str, what: str, **fields: object) -> Log:
        return Log(event="window", fields={"window": what, "member": member, **fields})


_STEPS_MOST, _STEPS_LEAST = 32, 3
"""The numbers of newest steps that count, at most and at least. With fewer steps the median is unknown."""
_REMEMBERED_STEPS = 100
"""Number of steps for which a healthy standstill is remembered."""
_WORTH_NOTING_S = 0.5


class DeviceFailures(AgentPart):
    """The accelerators that this node's workers see, and the failures of devices on all nodes."""

    def __init__(self, known: Sequence[Failure]) -> None:
        self.known = [*known]
        """All failures of devices, the newest last."""
        self._seen: dict[int, tuple[str, ...]] = {}
        """Slot -> the devices that its newest worker sees."""
        self._used: dict[str, str] = {}
        """Member of this node -> the device that it computes on."""

    @handles(am.OnDevice)
    def on_device(self, worker: Worker, message: am.OnDevice) -> list[Command]:
        """Note the device of a worker. Its hello is refused if no worker is to compute there."""
        self._seen[worker.slot], self._used[worker.id] = message.seen, message.device
        return [Log(event="device", fields={"member": worker.id, "device": message.device})]

    def note(self, failure: Failure) -> None:
        """Note the failure of a device."""
        self.known.append(failure)

    def objection(self, member: str) -> str:
        """Return why this worker may not compute on its device, or ""."""
        return objection(self._used.get(member, ""), self.known)

    def told(self, slot: int) -> ToldDevices | None:
        """Return what a worker that is started in this slot is told; None if nothing is known."""
        seen, out = self._seen.get(slot, ()), left_out(self.known)
        return ToldDevices(seen=seen, left_out=out) if seen or out else None

    def nothing_left(self, slot: int) -> str:
        """Return a sentence if a worker in this slot would see no device that is not left out, else ""."""
        return nothing_left(self._seen.get(slot, ()), self.known)

    def described(self) -> list[dict[str, Any]]:
        """Return the devices that have failed, for `status`."""
        times, out = times_failed(self.known), left_out(self.known)
        return [{"device": device, "failures": count, "left_out": device in out} for device, count in times.items()]


class Pace:
    """Durations of committed steps, and the longest standstills of threads that went on by themselves afterwards."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_STEPS_MOST)
        self._newest: tuple[int, float] | None = None
        """The newest committed step, and the time when this agent first heard of it."""
        self._healthy: deque[tuple[int, Station, float]] = deque()
        """Healthy standstills: (step, place, seconds)."""

    def commit(self, step: int, now: float) -> None:
        """Record that a member of this node has committed a step. Only the first report of a step counts."""
        if self._newest is not None and step <= self._newest[0]:
            return
        # No duration is known if this agent heard nothing of the step before (it had no member in the view then).
        if self._newest is not None and step == self._newest[0] + 1:
            self._steps_s.append(now - self._newest[1])
        self._newest = (step, now)
        while self._healthy and self._healthy[0][0] < step - _REMEMBERED_STEPS:
            self._healthy.popleft()

    def note(self, place: Station, stood_s: float) -> None:
        """Record that a thread stood still at a place for this time, and went on by itself."""
        if stood_s >= _WORTH_NOTING_S and self._newest is not None:
            self._healthy.append((self._newest[0], place, stood_s))

    @property
    def step_s(self) -> float | None:
        """Median duration of the newest steps, or None if there are too few.

        An evaluation in less than half of them does not distort it.
        """
        return median(self._steps_s) if len(self._steps_s) >= _STEPS_LEAST else None

    def longest_s(self, place: Station) -> float:
        """Return the longest healthy standstill at a place. Very uneven micro-batches cause long ones."""
        return max((stood_s for _, where, stood_s in self._healthy if where is place), default=0.0)
