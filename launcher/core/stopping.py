"""A signal says that this node, or the job, is to stop: members hand over, or write one last checkpoint, first."""

from __future__ import annotations

from elastrain.agent_messages import CheckpointEnded, HandOver, WriteLast
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HandOverDue, TogetherDue
from elastrain.launcher.core.events import StopAsked
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.notices import LastWritten, Leaving
from elastrain.launcher.values import Command, Log, Tell, TellNodes

PREEMPTED = 128 + 15
"""The code of an agent that has got SIGTERM: a notice that its machine is wanted elsewhere, or a stop of the job."""


class Stopping:
    """Owns whether the last checkpoint is being written; who leaves, and the end, are `Shutdown`'s."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._times = cluster, cluster.config.leave
        self._deadlines, self._shutdown = deadlines, shutdown
        self._writes_last = False

    def on_stop(self, event: StopAsked, now: float) -> list[Command]:
        """Handle a signal to stop. Where others go on, this node leaves between two steps: no work is lost."""
        shutdown = self._shutdown
        is_first = shutdown.end is None and shutdown.leaving is None and not shutdown.finishing
        may_wait = is_first and self._cluster.progress.begun and bool(self._cluster.unfinished())
        if may_wait and self._times.last_checkpoint_s:
            shutdown.leaving = event
            return [TellNodes(message=Leaving()), *self._look_around(now)]
        if may_wait and event.code == PREEMPTED and self._cluster.others_stay():
            shutdown.leaving = event
            return [*self._hand_over(now), TellNodes(message=Leaving())]
        # Others who were told the same need not wait for the end of a step that nobody goes on from.
        told = [TellNodes(message=Leaving())] if event.code == PREEMPTED and shutdown.end is None else []
        return [*told, *shutdown.finish(event.code, event.sentence, everywhere=False)]

    def on_leaving(self, node: str, now: float) -> list[Command]:
        """Handle a node that goes. Where all do, the whole job is stopped, and nobody is left to hand over to."""
        if node in self._cluster.peers.nodes:
            self._cluster.peers.nodes[node].leaving = True
        if self._shutdown.leaving is None or self._writes_last:
            return []
        if TogetherDue() in self._deadlines:
            return [] if self._cluster.others_go_on() else self._write_last(now)
        if self._cluster.others_stay():
            return []
        # What is not handed over yet would go with this node, and the others' last checkpoint lack it.
        is_awaited = self._times.last_checkpoint_s and self._cluster.unfinished()
        return self._write_last(now) if is_awaited else self._shutdown.leave()

    def on_due(self, due: TogetherDue | HandOverDue, now: float) -> list[Command]:
        """Go on: whoever was told to go as this node was has said so by now, or what was waited for takes too long."""
        assert self._shutdown.leaving is not None
        is_notice = self._shutdown.leaving.code == PREEMPTED
        return self._hand_over(now) if is_notice and isinstance(due, TogetherDue) else self._shutdown.leave()

    def on_written(self, message: CheckpointEnded) -> list[Command]:
        """Handle the last checkpoint, which a member of this node has written."""
        if not message.last or self._shutdown.leaving is None:
            return []
        return [TellNodes(message=LastWritten()), *self._shutdown.leave()]

    def on_others_written(self) -> list[Command]:
        return self._shutdown.leave() if self._writes_last and self._shutdown.leaving is not None else []

    def _look_around(self, now: float) -> list[Command]:
        """Wait until it shows whether only this node is to go or all are: nodes told at the same time say so then."""
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
        return [log, *(Tell(member=w.id, message=WriteLast()) for w in self._cluster.unfinished())]

    def _hand_over(self, now: float) -> list[Command]:
        assert self._shutdown.leaving is not None
        mine, sentence = self._cluster.unfinished(), self._shutdown.leaving.sentence
        self._deadlines.set(HandOverDue(), now + self._times.hand_over_s)
        members = ", ".join(w.id for w in mine)
        when = "at the end of a step, once another node has their state; then this one goes"
        say = f"{sentence}: {members} hand over {when}"
        log = Log(event="leaving", fields={"members": [w.id for w in mine]}, say=say)
        return [log, *(Tell(member=w.id, message=HandOver()) for w in mine)]
