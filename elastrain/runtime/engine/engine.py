"""The worker's engine: one thread that drives the protocol core with real links, real tensors and a real launcher.

In each turn it takes events from the mesh, the agent and the training loop, passes them to the core one at a time and
carries out the core's commands in order. Then it does one piece of background work. It never computes gradients, and
the main thread never sends: forward and backward go on while the engine folds, commits and recovers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastrain import errors
from elastrain import protocol as p
from elastrain.base.thread_status import Station
from elastrain.comm.shm.heartbeat_page import Trail
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.addresses import Frame, LossCause, Newer, Peer, PeerLost
from elastrain.comm.wire.mesh import Mesh
from elastrain.job.values import Record
from elastrain.job.world import Member, View
from elastrain.member.member_machine import MemberMachine
from elastrain.offload.drives.compression import IdleCores
from elastrain.protocol import agent_messages as am
from elastrain.protocol.messages import decode
from elastrain.runtime.engine.copy_pace import Clock
from elastrain.runtime.engine.pacing import HANDED_OVER_S, RECOVERY_DEADLINE_S, Departure, EnginePace
from elastrain.runtime.engine.planner_thread import answer_later, memory_seen
from elastrain.runtime.engine.sender import Sender
from elastrain.runtime.engine.slot_assignment import SlotAssignment
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io import loop_channel as lc
from elastrain.runtime.io.agent_link import AgentLink, journalled
from elastrain.runtime.io.journal import Journal, Notes
from elastrain.runtime.memory.memory_keeper import MemoryKeeper
from elastrain.runtime.memory.room_for_plans import room_after_step, room_for_step, room_for_view
from elastrain.runtime.memory.stages_choice import with_stages
from elastrain.runtime.tensors.executor import Executor


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts that the engine drives. `assembly` makes them."""

    mesh: Mesh
    beacon: Beacon
    agent: AgentLink
    executor: Executor
    handover: lc.LoopChannel
    faults: ArmedFaults
    journal: Journal
    memory: MemoryKeeper | None
    """None without a memory limit."""
    report: Callable[[Exception], None]
    """Called in the engine's thread with the exception that ended it, before the main thread raises the same."""
    trail: Trail
    """Page by which the agent sees that the engine turns."""
    clock: Clock = time.monotonic
    idle_cores: Callable[[], float] = field(default_factory=lambda: IdleCores().look)


class Engine:
    """The engine thread. The main thread makes, starts and closes it; the loop talks to it through `LoopChannel`."""

    def __init__(self, core: MemberMachine, parts: EngineParts) -> None:
        self.view: View | None = None
        """The view of the mesh. The main thread reads it for rank and world size."""
        self._core = core
        self._parts = parts
        self._outgoing = Sender(parts.mesh, parts.executor, parts.faults, parts.journal)
        self._events: deque[p.Event] = deque()
        self._pace = EnginePace(
            core.copying,
            parts.handover.whereabouts,
            clock=parts.clock,
            idle_cores=parts.idle_cores,
            busy=parts.mesh.links.busy,
        )
        self._notes = Notes(parts.journal, parts.agent)
        self._handing = SlotAssignment(parts.executor, parts.handover, self._make_room)
        self._unreleased: p.Advance | p.Enter | None = None
        """Command for the loop that waits until the committed parameters are known to be whole."""
        self._departure = Departure()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastrain-engine", daemon=True)

    @property
    def record(self) -> Record | None:
        """The newest record. The threads of the loop and of its loader read it."""
        return self._core.record

    def start(self, spec: dict[str, Any]) -> None:
        """Start the thread, and tell the launcher that this member is ready. Without one, make a view of one member."""
        parts = self._parts
        if parts.agent.is_there:
            parts.mesh.watch(parts.agent.fileno(), parts.agent.note_readable)
            hello = am.Hello(member=parts.agent.me, address=parts.mesh.address, spec=spec)
            parts.agent.say(hello, fd=parts.beacon.fd)
        else:
            alone = Member(id=parts.agent.me, node="node0", address=parts.mesh.address)
            parts.handover.tell(p.Viewed(view=View(generation=1, members=(alone,), reason="a job of one")))
        parts.handover.landing.begin()
        self._thread.start()

    def close(self) -> None:
        """End the engine. Waits only for the end of its current turn, at most 5 seconds."""
        self._stopped.set()
        self._parts.mesh.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        trail = self._parts.trail
        try:
            trail.move(Station.TURNING)
            with self._parts.handover.landing.engine_stream():
                while not self._stopped.is_set():
                    trail.beat()
                    self.turn()
        except Exception as failure:  # noqa: BLE001 - the edge of the thread: the main thread raises any exception
            self._give_up(failure)
        finally:
            trail.move(Station.OUTSIDE)
            self._parts.handover.end()
            self._parts.mesh.close()

    def _give_up(self, failure: Exception) -> None:
        """Report the failure now, because other processes may end this one while its main thread still computes."""
        if not self._stopped.is_set():
            self._parts.report(failure)
        self._parts.handover.end(failure)

    def turn(self) -> None:
        """Handle all arrivals and events, then do one piece of background work."""
        mesh, agent = self._parts.mesh, self._parts.agent
        executor, handover = self._parts.executor, self._parts.handover
        wait_s = self._pace.wait_s(has_news=handover.has_news, has_work_behind=executor.books.has_work_behind)
        for arrival in self._pace.copies.in_turn(mesh.poll(wait_s)):
            self._on_arrival(arrival)
        for message in agent.heard():
            self._on_message(message)
        for told in handover.take():
            self._on_told(told)
        self._release_held()
        for allowed in self._pace.copies.allowances():
            self._handle(allowed)
        if executor.books.has_work_behind and not handover.has_news and self._pace.loop.may_work_behind():
            for result in executor.books.work_behind():
                self._handle(result)
        if self._pace.recovery.is_over() and self.view is not None:
            self._notes.suspect(self._core.unreported(), self.view, RECOVERY_DEADLINE_S)
        self._notes.tell_reason(self._core, self._parts.clock())
        if executor.is_checkpoint_due(self.view, self._parts.clock()):
            self._handle(p.CheckpointWanted(last=False))

    def _on_arrival(self, arrival: Frame | PeerLost | Newer) -> None:
        match arrival:
            case Frame(source=source, generation=generation):
                message = decode(arrival.kind, arrival.body)
                self._handle(p.Arrived(source=source, generation=generation, message=message, payload=arrival.tensors))
            case PeerLost(member=member, reason=reason):
                self._parts.journal.write("lost", at_s=arrival.at_s, peer=member, reason=reason)
                self._parts.agent.say(
                    am.Suspect(
                        member=member,
                        reason=reason,
                        dead=arrival.cause is LossCause.DEAD,
                        generation=self.view.generation if self.view is not None else 0,
                        link_lost=arrival.cause in (LossCause.BROKEN, LossCause.UNREACHED),
                    )
                )
            # `Newer` needs no answer, because the agent announces the newer view itself.

    def _on_message(self, message: am.ToWorker) -> None:
        match message:
            case am.NewView(view=view):
                self._notes.note_view("view", view)
                self._handle(p.Viewed(view=view))
            case am.FirstCommitAllowed():
                self._handle(p.CommitAllowed())
            case am.Drain():
                self._departure.ask()
            case am.WriteLast():
                self._handle(p.CheckpointWanted(last=True))
            case am.CheckpointSettled():
                self._parts.executor.checkpoint_settled(message)
            case am.EndReached():
                self._handle(p.JobEnded())
            case am.ArmFault():
                self._parts.faults.arm(message)
            case am.Refused():
                raise errors.RefusedError(message.reason)
            case am.Stop():
                raise errors.StoppedError(message.reason)

    def _on_told(self, told: lc.Told) -> None:
        match told:
            case lc.TryAgain():
                self._handing.give_again(told)
            case lc.LoopFailed(error=error):
                raise error
            case lc.BoundaryMade():
                self._handle(self._handing.keep(told))
            case p.Traced() if self.view is not None:
                memory = memory_seen(self._parts.memory, self._parts.executor, self._parts.handover, self.view).memory
                self._handle(with_stages(told, self._core, self._parts.executor, memory))
            case lc.StepBegun(event=event):
                self._parts.executor.begin_step(event.step, told.hyper, told.payload)
                self._outgoing.use_loop_payload(told.payload)
                self._handle(event)
            case _:
                self._pace.loop.heard(told)
                self._handle(told)

    def _handle(self, event: p.Event) -> None:
        self._events.append(event)
        while self._events:
            current = self._events.popleft()
            commands = self._core.handle(current)
            self._handing.note(current)
            for command in commands:
                done = command.message if isinstance(command, p.SendMessage) else command
                self._parts.trail.move(Station.TURNING, step=getattr(done, "step", -1), name=type(done).__name__)
                result = self._carry_out(command)
                if result is not None:
                    self._events.append(result)

    def _carry_out(self, command: p.Command) -> p.Event | None:
        self._parts.faults.reach_before(command)
        match command:
            case p.SendMessage():
                self._outgoing.send(command)
            case p.Compute() | p.Recompute() | p.Forward() | p.Backward() | p.WeightGradients() | p.WarmUp():
                if not isinstance(command, p.Recompute | p.WarmUp):
                    self._pace.loop.let_loop_go_first(HANDED_OVER_S)
                self._handing.give(command)
            case p.Advance() | p.Enter():
                self._hold(command)
            case p.Leave():
                self._release(command)
            case p.EditMesh():
                self._edit(command.view)
            case p.Passed():
                self._passed(command.record)
            case p.Resumed():
                return self._resumed(command)
            case p.Fail():
                self._parts.journal.write("failed", kind=command.kind, reason=command.reason)
                raise getattr(errors, command.kind)(command.reason)
            case p.Noticed() | p.BeginAnew() | p.AskToCommit() | p.Moved():
                return self._notes.hear(command, self.view)
            case p.HoldBlocks():
                self._hold_blocks(command)
            case p.StateFetched():
                self._parts.handover.give(lc.StatesGiven())
            case p.ChoosePlan():
                self._notes.asked(command)
                answer_later(command, self._parts.handover.tell, self._notes.decided, self._parts.memory)
            case p.EvaluateBatch() | p.EvaluationEnded():
                self._handing.evaluate(command)
            case p.ReadView():
                self._parts.journal.write("newer", generation=command.generation)
            case _:
                return self._parts.executor.carry_out(command)
        return None

    def _hold_blocks(self, command: p.HoldBlocks) -> None:
        """Change the blocks that this member holds, and return the memory of removed ones to the kernel at once."""
        executor, memory = self._parts.executor, self._parts.mesh.memory
        if self._parts.memory is not None:
            self._parts.memory.hold(command.blocks, for_good=command.for_good)
        executor.carry_out(command)
        memory.trim()
        held = {"parameters_bytes": executor.model.nbytes, "shared_bytes": memory.resident_bytes()}
        self._parts.journal.write("holds", blocks=list(command.blocks), **held)

    def _hold(self, command: p.Advance | p.Enter) -> None:
        """Release the loop only once the parameters are known to be whole.

        A member that was stopped and removed may have copied them from memory that peers have reused since.
        """
        self._unreleased = command
        self._release_held()

    def _release_held(self) -> None:
        """Release the loop if all peers are in this view: they reuse no memory before this member's report comes."""
        if self._unreleased is not None and not self._parts.mesh.links.may_be_torn():
            command, self._unreleased = self._unreleased, None
            self._release(command)

    def _release(self, command: p.Advance | p.Enter | p.Leave) -> None:
        handover, me = self._parts.handover, self._parts.agent.me
        match command:
            case p.Advance():
                self._parts.journal.write("advance", step=command.record.step)
                # The next step has not begun here, so no work and no state is lost with this member.
                if self._departure.may_go(self._core.machine.held_elsewhere()):
                    self._give_up(errors.StoppedError(f"{me} has handed over after step {command.record.step}"))
                else:
                    handover.give(command)
            case p.Enter():
                self._parts.faults.reach(command.step, "join")
                handover.give(command)
            case p.Leave(evicted=True):
                self._give_up(errors.StoppedError(f"member {me} was removed from the job: start it again to join anew"))
            case p.Leave():
                handover.give(lc.LoopOver(overruled=command.overruled, last=self._core.record))

    def _edit(self, view: View) -> None:
        before, self.view = self.view, view
        self._pace.recovery.begin()
        self._pace.loop.let_loop_go_first(0.0)  # a new primary may need the update that it has put off as a backup
        self._notes.note_view("edit", view)
        peers = [Peer(id=m.id, node=m.node, address=m.address) for m in view.members]
        renew = before is not None and view.links_since > before.generation
        self._parts.mesh.edit(view.generation, peers, links="all", renew=renew)

    def _resumed(self, command: p.Resumed) -> p.Event | None:
        self._pace.recovery.end()
        self._notes.resumed(command)
        self._notes.tell_window(self._core)
        self._parts.executor.resumed()
        return room_for_view(self._parts.memory, self._core.machine, command)

    def _make_room(self) -> None:
        if (told := room_for_step(self._parts.memory, self._core.machine)) is not None:
            self._events.append(told)

    def _passed(self, record: Record) -> None:
        self._pace.loop.committed()
        self._parts.journal.write("passed", **journalled(record))
        took_s = self._parts.handover.whereabouts.take_computed_s()
        self._pace.copies.computed(took_s)
        self._events.append(p.LinksTimed(bytes_per_s=self._parts.mesh.links.take_rates()))
        self._parts.agent.committed(record, self._core.holders, took_s)
        self._notes.tell_window(self._core)
        self._notes.passed(record, self.view)
        self._parts.executor.carry_out(p.Passed(record=record))
        memory = self._parts.memory
        if (told := room_after_step(memory, self._core.machine, record)) is not None:
            self._events.append(told)
        has_room = memory is None or memory.has_room_for_any_share()
        self._events.append(p.StepTimed(micro_batch_s=took_s, has_room=has_room))
        if self._core.machine.shape.pipelining is not None and self.view is not None:
            self._events.append(memory_seen(self._parts.memory, self._parts.executor, self._parts.handover, self.view))
        self._parts.executor.check_is_over()
