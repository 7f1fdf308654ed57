"""Stops: members first hand over their state, or write one last checkpoint. Decisions of one agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elastrain.launcher.core.agent_events import AgentPart, StopAsked
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HandOverDue, TogetherDue
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.shared.job_values import Command, Log, Tell, TellNodes
from elastrain.launcher.shared.notices import LastWritten, Leaving, StopNode
from elastrain.protocol import agent_messages as am
from elastrain.protocol.handlers import handles


class OperatorAnswer(NamedTuple):
    """Answer to an operator's command, with what follows from it."""

    sentence: str
    taken: bool
    commands: list[Command]


PREEMPTED = 128 + 15
"""Exit code of an agent after SIGTERM: its machine is needed elsewhere, or the job is to stop."""


STOPPED = 128 + 2
"""Exit code of every agent after `elastrain stop`, as after Ctrl-C on all nodes."""


class Stopping(AgentPart):
    """Stops by a signal or the operator: members first hand over their state, or write one last checkpoint."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._times = cluster, cluster.config.leave
        self._deadlines, self._shutdown = deadlines, shutdown
        self._writes_last = False

    @handles(StopAsked)
    def on_stop(self, event: StopAsked, now: float) -> list[Command]:
        """Handle a signal to stop. If others go on, this node leaves between two steps, and no work is lost."""
        shutdown = self._shutdown
        is_first = shutdown.end is None and shutdown.leaving is None and not shutdown.finishing
        may_wait = is_first and self._cluster.progress.begun and bool(self._cluster.unfinished())
        if may_wait and self._times.last_checkpoint_s:
            shutdown.begin_to_leave(event)
            return [TellNodes(message=Leaving()), *self._look_around(now)]
        if may_wait and event.code == PREEMPTED and self._cluster.others_stay():
            shutdown.begin_to_leave(event)
            return [*self._hand_over(now), TellNodes(message=Leaving())]
        # Other nodes with the same signal need not wait for the end of the step.
        told = [TellNodes(message=Leaving())] if event.code == PREEMPTED and shutdown.end is None else []
        return [*told, *shutdown.finish(event.code, event.sentence, everywhere=False)]

    @handles(StopNode)
    def on_other(self, notice: StopNode, now: float) -> list[Command]:
        """Handle the operator's wish to stop this node, as another node tells it."""
        return self.on_stop(StopAsked(code=notice.code, sentence=notice.sentence), now)

    def stop_all(self, now: float) -> OperatorAnswer:
        """Stop all nodes of the job, after one last checkpoint if it writes any."""
        asked = StopAsked(code=STOPPED, sentence="stopped by `elastrain stop`")
        told = (
            [] if self._cluster.config.alone else [TellNodes(message=StopNode(code=STOPPED, sentence=asked.sentence))]
        )
        return OperatorAnswer("all nodes of the job stop", True, [*told, *self.on_stop(asked, now)])

    def drain(self, name: str, now: float) -> OperatorAnswer:
        """Let a node hand over and leave. A member stands for its node if that has no other member."""
        cluster, me = self._cluster, self._cluster.config.node
        nodes = {me} | {node for node, peer in cluster.peers.nodes.items() if peer.linked}
        living = [member for member in cluster.members if cluster.is_alive(member.id)]
        node = next((member.node for member in living if member.id == name), name)
        beside = [member.id for member in living if member.node == node and node != name and member.id != name]
        problem = _why_not_drain(name, node, nodes=sorted(nodes), beside=beside)
        if problem:
            return OperatorAnswer(problem, False, [])
        asked = StopAsked(code=PREEMPTED, sentence="drained by `elastrain drain`")
        to = TellNodes(message=StopNode(code=asked.code, sentence=asked.sentence), node=node)
        return OperatorAnswer(f"{node} hands over and leaves", True, self.on_stop(asked, now) if node == me else [to])

    @handles(Leaving)
    def on_leaving(self, node: str, now: float) -> list[Command]:
        """Handle a node that leaves. If all nodes leave, the job stops, and there is no node to hand over to."""
        if node in self._cluster.peers.nodes:
            self._cluster.peers.nodes[node].begin_to_leave()
        if self._shutdown.leaving is None or self._writes_last:
            return []
        if TogetherDue() in self._deadlines:
            return [] if self._cluster.others_go_on() else self._write_last(now)
        if self._cluster.others_stay():
            return []
        # State that was not handed over would be missing from the last checkpoint of the others.
        is_awaited = self._times.last_checkpoint_s and self._cluster.unfinished()
        return self._write_last(now) if is_awaited else self._shutdown.leave()

    @handles(TogetherDue, HandOverDue)
    def on_due(self, due: TogetherDue | HandOverDue, now: float) -> list[Command]:
        """Go on after a wait: other nodes had time to report the same signal, or the members took too long."""
        assert self._shutdown.leaving is not None
        is_notice = self._shutdown.leaving.code == PREEMPTED
        return self._hand_over(now) if is_notice and isinstance(due, TogetherDue) else self._shutdown.leave()

    @handles(am.CheckpointEnded)
    def on_written(self, message: am.CheckpointEnded) -> list[Command]:
        """Handle the end of a checkpoint. After the last one, written by a member of this node, the node ends."""
        commands = self._cluster.checkpoints.on_ended(message)
        if not message.last or self._shutdown.leaving is None:
            return commands
        return [*commands, TellNodes(message=LastWritten()), *self._shutdown.leave()]

    @handles(LastWritten)
    def on_others_written(self) -> list[Command]:
        """End this node after a member of another node has written the last checkpoint."""
        return self._shutdown.leave() if self._writes_last and self._shutdown.leaving is not None else []

    def _look_around(self, now: float) -> list[Command]:
        """Wait a moment for other nodes to report the same signal: all nodes may be about to stop."""
        if not self._cluster.others_go_on():
            return self._write_last(now)
        self._deadlines.set(TogetherDue(), now + self._times.together_s)
        return []

    def _write_last(self, now: float) -> list[Command]:
        assert self._shutdown.leaving is not None
        self._writes_last = True
        self._deadlines.drop(TogetherDue())
        self._deadlines.set(HandOverDue(), now + self._times.last_checkpoint_s)
        sentence, at_most_s = self._shutdown.leaving.sentence, self._times.last_checkpoint_s
        say = f"{sentence}: one last checkpoint is written, for which the job waits {at_most_s:g} s at the most"
        log = Log(event="last_checkpoint", fields={"at_most_s": at_most_s}, say=say)
        return [log, *(Tell(member=w.id, message=am.WriteLast()) for w in self._cluster.unfinished())]

    def _hand_over(self, now: float) -> list[Command]:
        assert self._shutdown.leaving is not None
        mine, sentence = self._cluster.unfinished(), self._shutdown.leaving.sentence
        self._deadlines.set(HandOverDue(), now + self._times.hand_over_s)
        members = ", ".join(w.id for w in mine)
        when = "at the end of a step, once another node has their state; then this one goes"
        say = f"{sentence}: {members} hand over {when}"
        log = Log(event="leaving", fields={"members": [w.id for w in mine]}, say=say)
        return [log, *(Tell(member=w.id, message=am.Drain()) for w in mine)]


def _why_not_drain(name: str, node: str, *, nodes: Sequence[str], beside: Sequence[str]) -> str:
    """Return why the node cannot be drained, or "". `beside`: other members on it, if a member was named."""
    if node not in nodes:
        return f"no node that answers and no living member is called {name}; there are {', '.join(nodes)}"
    if len(nodes) == 1:
        return f"{node} is the only node: there is no other one to hand over to; end the job by `elastrain stop`"
    if beside:
        return f"{name} shares {node} with {', '.join(beside)}: drain the whole node, {node}"
    return ""
