"""The worker's engine: one thread that drives the protocol core with real links, real tensors and a real launcher.

The training loop (the main thread) and the engine talk through two queues. The engine never computes gradients, the
main thread never sends; forward and backward go on while the engine folds, commits, recovers and backs up.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastrain import agent_messages as am
from elastrain import errors
from elastrain import protocol as p
from elastrain.comm.errors import CommError
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import Frame, LossCause, Newer, Peer, PeerLost
from elastrain.lifecycle import Lifecycle
from elastrain.messages import Copied, LoopHandover, Message, Partial, Publish, ShardCopy, decode, encode
from elastrain.runtime.channel import Channel, ChannelClosedError
from elastrain.runtime.executor import Executor
from elastrain.runtime.faults import Faults
from elastrain.runtime.journal import Journal
from elastrain.runtime.memory_keeper import MemoryKeeper
from elastrain.runtime.model import GradientSlot
from elastrain.runtime.optimizer import Hyper
from elastrain.values import Record, Report, Vote
from elastrain.world import Member, View

POLL_S = 0.5
BETWEEN_STEPS_S = 0.05
"""How long background work waits at most between a commit and the next run: nobody computes meanwhile."""
HANDED_OVER_S = 0.003
"""How long it lets the training loop have the interpreter when that has got a run."""
RECOVERY_DEADLINE_S = 10.0
"""A report that has not come by then is reported to the agent, who judges its sender."""

_ENDS_THE_JOB: dict[str, type[am.LostState | am.Diverged]] = {
    "StateLostError": am.LostState,
    "DivergedError": am.Diverged,
}
"""What no replacement of this member could mend: told to the launcher, which ends the job on all nodes with it."""


@dataclass(frozen=True)
class Work:
    """A run to compute, with the slot for its gradients."""

    compute: p.Compute | p.Recompute
    slot: GradientSlot


@dataclass(frozen=True)
class _Again:
    """From the training loop: what this run has accumulated is void. The protocol waits for the run as before."""

    compute: p.Compute | p.Recompute


Payload = Callable[[], list[Tensor]]
Outcome = Work | p.Advance | p.Enter | p.Leave


class Engine:
    """Construct and `start` on the main thread; call the blocking methods from there only.

    `report` is called in the engine's thread with what ended it, before the main thread raises the same.
    """

    def __init__(
        self,
        *,
        me: str,
        mesh: Mesh,
        beacon: Beacon,
        core: Lifecycle,
        executor: Executor,
        channel: Channel | None,
        journal: Journal,
        faults: Faults,
        room: MemoryKeeper | None,
        report: Callable[[Exception], None],
    ) -> None:
        self.me = me
        self.view: View | None = None
        self.core = core
        self._mesh = mesh
        self._beacon = beacon
        self._executor = executor
        self._channel = channel
        self._journal = journal
        self._faults = faults
        self._room = room
        self._report = report
        self._inbox: deque[p.Event | _Again] = deque()
        self._events: deque[p.Event] = deque()
        self._outbox: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        """None: nothing more will come, look at `_failure`."""
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._recovering_since_s: float | None = None
        self._holders_told: object = None
        self._warned = False
        self._loop_payload: Payload = list
        self._loop_goes_first_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="elastrain-engine", daemon=True)

    # --------------------------------------------------------------------------------------------- for the main thread

    def start(self, spec: Mapping[str, Any]) -> None:
        """Tell the launcher that this member is ready; alone, the view is this member."""
        if self._channel is not None:
            self._mesh.watch(self._channel.fileno(), self._hear)
            hello = am.Hello(member=self.me, address=self._mesh.address, spec=dict(spec))
            self._channel.send(hello, fd=self._beacon.fd)
        else:
            alone = Member(id=self.me, node="node0", address=self._mesh.address)
            self._inbox.append(p.Viewed(view=View(generation=1, members=(alone,), reason="a job of one")))
        self._thread.start()

    def enter(self) -> p.Enter | p.Leave:
        """Wait until the loop may begin; says at which step."""
        outcome = self._next()
        assert isinstance(outcome, p.Enter | p.Leave)
        return outcome

    def begin(self, step: int, hyper: Hyper, settings: str, state: str, payload: Payload) -> None:
        """`payload` is called in the engine's thread when a newcomer is to get the state of this step."""
        self._executor.hyper[step] = hyper
        self._loop_payload = payload
        self._tell(p.Began(step=step, settings=settings, state=state))

    def next_work(self) -> Work | p.Advance | p.Leave:
        """Wait for a run to compute, or for the end of the step."""
        self._tell(p.Ready())
        outcome = self._next()
        assert not isinstance(outcome, p.Enter)
        return outcome

    def compute_again(self, work: Work) -> Work:
        """Another slot for a run whose backward failed. Raises StoppedError if the job has ended meanwhile."""
        self._inbox.append(_Again(work.compute))
        self._mesh.wake()
        outcome = self._next()
        if not isinstance(outcome, Work):
            raise errors.StoppedError("the job has ended")
        return outcome

    def block_done(self, event: p.BlockDone) -> None:
        self._tell(event)

    def checked(self, event: p.Checked) -> None:
        self._tell(event)

    def finish(self, step: int) -> None:
        """Wait until every member is at the end. Raises StoppedError if most members go on."""
        self._faults.reach(step, "shutdown")
        self._tell(p.LoopEnded(step=step))
        self._next()

    def close(self) -> None:
        """End the engine; nothing is waited for."""
        self._stopped.set()
        self._mesh.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    @staticmethod
    def now_s() -> float:
        return time.monotonic()

    def _tell(self, event: p.Event) -> None:
        self._inbox.append(event)
        self._mesh.wake()

    def _next(self) -> Outcome:
        while True:
            try:
                outcome = self._outbox.get(timeout=POLL_S)
            except queue.Empty:
                outcome = None
            if outcome is not None:
                return outcome
            if self._failure is not None:
                raise self._failure
            if not self._thread.is_alive():
                raise errors.StoppedError("the engine has ended")

    # --------------------------------------------------------------------------------------------------- the engine

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._turn()
        except Exception as failure:  # noqa: BLE001 - the edge of the thread: whatever it was, the main thread raises it
            self._give_up(failure)
        finally:
            self._mesh.close()

    def _give_up(self, failure: Exception) -> None:
        """The main thread may be in a long micro-batch, and others end this process before: the reason is told here."""
        if not self._stopped.is_set():
            self._report(failure)
        self._failure = failure
        self._outbox.put(None)

    def _turn(self) -> None:
        """Whatever came in, then one task that nobody waits for at once."""
        wait_s = POLL_S
        if self._inbox or self._executor.behind:
            until_s = self._loop_goes_first_until_s
            wait_s = 0.0 if self._inbox else min(POLL_S, max(0.0, until_s - time.monotonic()))
        for arrival in self._mesh.poll(wait_s):
            self._arrived(arrival)
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, _Again):
                self._outbox.put(Work(event.compute, self._executor.change_slot()))
            else:
                self._handle(event)
        if self._executor.behind and not self._inbox and self._may_work_behind():
            for result in self._executor.work_behind():
                self._handle(result)
        self._watch_recovery()

    def _may_work_behind(self) -> bool:
        """Between two steps, what the training loop waits for goes first: parameters of others, and the interpreter."""
        return time.monotonic() >= self._loop_goes_first_until_s

    def _let_loop_go_first(self, for_s: float) -> None:
        self._loop_goes_first_until_s = time.monotonic() + for_s

    def _arrived(self, arrival: Frame | PeerLost | Newer) -> None:
        match arrival:
            case Frame():
                message = decode(arrival.kind, arrival.body)
                self._handle(
                    p.Arrived(
                        source=arrival.source,
                        generation=arrival.generation,
                        message=message,
                        payload=arrival.tensors,
                    )
                )
            case PeerLost():
                self._journal.write("lost", at_s=arrival.at_s, peer=arrival.member, reason=arrival.reason)
                self._suspect(arrival.member, arrival.reason, dead=arrival.cause is LossCause.DEAD)
            case Newer():
                pass  # the agent tells every view as soon as it stands: there is nothing to ask for

    def _handle(self, event: p.Event) -> None:
        self._events.append(event)
        while self._events:
            current = self._events.popleft()
            self._before(current)
            for command in self.core.handle(current):
                result = self._carry_out(command)
                if result is not None:
                    self._events.append(result)

    def _before(self, event: p.Event) -> None:
        if isinstance(event, p.BlockDone):
            self._executor.block_done(event)
        elif isinstance(event, p.Ready):
            self._executor.end_run()

    def _carry_out(self, command: p.Command) -> p.Event | None:
        match command:
            case p.Send():
                self._send(command)
            case p.Compute():
                self._let_loop_go_first(HANDED_OVER_S)
                self._outbox.put(Work(command, self._executor.start_run()))
            case p.Recompute():
                self._outbox.put(Work(command, self._executor.check_slot()))
            case p.Advance() | p.Enter() | p.Leave():
                self._release(command)
            case p.EditMesh():
                self._edit(command.view)
            case p.Passed():
                self._passed(command)
            case p.Resumed():
                self._resumed(command)
            case p.Noticed():
                self._noticed(command.reason)
            case p.Fail():
                self._fail(command)
            case p.ReadView():
                self._journal.write("newer", generation=command.generation)
            case _:
                self._reach_phase(command)
                return self._executor.carry_out(command)
        return None

    def _reach_phase(self, command: p.Command) -> None:
        match command:
            case p.Keep():
                self._faults.reach(command.step, "reduce")
            case p.Apply():
                self._faults.reach(command.record.step, "apply")
            case p.TakeCopy():
                self._faults.reach(command.step + 1, "rebalance")

    # ----------------------------------------------------------------------------------------------------- the outside

    def _send(self, command: p.Send) -> None:
        message = command.message
        kind, body = encode(message)
        match message:
            case Partial():
                self._faults.reach(message.step, "reduce")
            case Report() if message.committed >= 0:
                self._faults.reach(message.committed + 1, "recover")
            case ShardCopy() | Copied():
                self._faults.reach(message.step + 1, "rebalance")
        try:
            self._mesh.send(command.to, kind, body, self._payload(message))
        except CommError as error:  # the view will say what became of the receiver
            self._journal.write("unsent", to=command.to, reason=str(error))
        match message:  # after some members have got it and others have not
            case Vote():
                self._faults.reach(message.step, "commit")
            case Publish():
                self._faults.reach(message.step, "publish")

    def _payload(self, message: Message) -> list[Tensor]:
        return self._loop_payload() if isinstance(message, LoopHandover) else self._executor.payload(message)

    def _edit(self, view: View) -> None:
        self.view = view
        self._recovering_since_s = time.monotonic()
        self._journal.write("edit", generation=view.generation, members=list(view.ids), reason=view.reason)
        peers = [Peer(id=m.id, node=m.node, address=m.address) for m in view.members]
        self._mesh.edit(view.generation, peers, links="all")

    def _resumed(self, command: p.Resumed) -> None:
        self._recovering_since_s = None
        recovery = command.recovery
        self._journal.write(
            "resumed",
            generation=command.view.generation,
            committed=recovery.committed,
            redone=recovery.redone,
            reason=recovery.reason,
            runs={member: list(runs) for member, runs in recovery.runs.items()},
        )
        if self._room is not None:
            self._room.resumed(command.view, self.core, recovery)

    def _passed(self, command: p.Passed) -> None:
        self._let_loop_go_first(BETWEEN_STEPS_S)
        record = command.record
        told = record.contribution
        loss = told.loss / told.weight if told.weight else None
        self._journal.write(
            "passed",
            step=record.step,
            generation=record.generation,
            loss=loss,
            samples=told.samples,
            fingerprint=told.fingerprint,
            skipped=record.skipped,
            loss_scale=record.scaler.scale,
        )
        loss = loss if loss is None or loss == loss else None
        self._say(am.Progress(step=record.step, loss=loss, samples=told.samples, holders=self._holders_news()))
        if record.warning:
            self._warn(record)
        if self._room is not None:
            self._room.passed()
        self._executor.check_is_over()

    def _warn(self, record: Record) -> None:
        """On the screen once, by one member."""
        self._journal.write("warning", step=record.step, reason=record.warning)
        if not self._warned and self.view is not None and self.view.ids[0] == self.me:
            sys.stderr.write(f"elastrain: warning: {record.warning}\n")
            sys.stderr.flush()
        self._warned = True

    def _holders_news(self) -> dict[str, tuple[str, ...]] | None:
        """Who holds what, when it changed: the launcher judges by it whether a view keeps the state."""
        holders = self.core.now
        if holders == self._holders_told:
            return None
        self._holders_told = holders
        return {str(shard): h.all for shard, h in enumerate(holders)}

    def _release(self, outcome: p.Advance | p.Enter | p.Leave) -> None:
        if isinstance(outcome, p.Advance):
            self._journal.write("advance", step=outcome.record.step)
        elif isinstance(outcome, p.Enter):
            self._faults.reach(outcome.step, "join")
        elif outcome.evicted:
            self._give_up(
                errors.StoppedError(f"member {self.me} was removed from the job: start it again to join anew")
            )
            return
        self._outbox.put(outcome)

    def _noticed(self, reason: str) -> None:
        """It was put right; whoever looks after the machine should know."""
        self._journal.write("noticed", reason=reason)
        self._say(am.Note(fields={"noticed": reason}))
        sys.stderr.write(f"elastrain: {reason}\n")
        sys.stderr.flush()

    def _fail(self, command: p.Fail) -> None:
        self._journal.write("failed", kind=command.kind, reason=command.reason)
        if command.kind in _ENDS_THE_JOB:
            self._say(_ENDS_THE_JOB[command.kind](sentence=command.reason))
        raise getattr(errors, command.kind)(command.reason)

    def _hear(self) -> None:
        """The agent's messages, read inside the mesh's poll."""
        assert self._channel is not None
        try:
            messages = self._channel.receive()
        except ChannelClosedError as error:
            raise errors.StoppedError(f"the launcher is gone ({error}); this worker stops") from error
        for message in messages:
            self._heard(message)

    def _heard(self, message: am.ToWorker) -> None:
        match message:
            case am.NewView(view=view):
                self._journal.write("view", generation=view.generation, members=list(view.ids), reason=view.reason)
                self._inbox.append(p.Viewed(view=view))
            case am.EndReached():
                self._inbox.append(p.JobEnded())
            case am.ArmFault():
                self._faults.arm(message)
            case am.Refused():
                raise errors.RefusedError(message.reason)
            case am.Stop():
                raise errors.StoppedError(message.reason)

    def _suspect(self, member: str, reason: str, *, dead: bool = False) -> None:
        self._say(am.Suspect(member=member, reason=reason, dead=dead))

    def _say(self, message: am.FromWorker) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _watch_recovery(self) -> None:
        since = self._recovering_since_s
        if since is None or time.monotonic() - since < RECOVERY_DEADLINE_S or self.view is None:
            return
        self._recovering_since_s = time.monotonic()
        for member in self.core.unreported():
            self._suspect(member, f"no report for generation {self.view.generation} in {RECOVERY_DEADLINE_S:.0f} s")
