"""Members that do not reach one another, though no death is proven."""

from __future__ import annotations

from elastrain.agent_messages import Suspect
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, SuspicionDue
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.notices import Suspected
from elastrain.launcher.values import Command, Log, TellNodes
from elastrain.membership import without_a_suspect


class Suspicions:
    """Owns who is suspected by whom, until that is judged."""

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        view_changes: ViewChanges,
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._view_changes = deadlines, shutdown, view_changes
        self._by_member: dict[str, set[str]] = {}

    def on_suspect(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        """A worker of this node says that it does not reach another member."""
        commands = self._note(message.member, by.id, message.reason, now)
        if commands and not self._config.alone:
            notice = Suspected(member=message.member, by=by.id, reason=message.reason)
            commands.append(TellNodes(message=notice))
        return commands

    def on_suspected(self, node: str, notice: Suspected, now: float) -> list[Command]:
        """A worker of another node says so."""
        return self._note(notice.member, notice.by, notice.reason, now)

    def forget(self, member: str) -> None:
        """It is dead."""
        self._by_member.pop(member, None)

    def _note(self, member: str, by: str, reason: str, now: float) -> list[Command]:
        cluster, worker = self._cluster, self._cluster.workers.by_id.get(member)
        if member not in cluster.ids or self._shutdown.finishing or not cluster.is_alive(member):
            return []
        if worker is not None and worker.finished:  # it closes its links because it leaves
            return []
        self._by_member.setdefault(member, set()).add(by)
        # A death is proven within milliseconds; what is still alive after this time has lost its links, not its life.
        self._deadlines.set_first(SuspicionDue(), now + self._config.times.suspicion_s)
        return [Log(event="suspect", fields={"member": member, "by": by, "reason": reason})]

    def on_due(self, due: SuspicionDue, now: float) -> list[Command]:
        """One agent chooses, and the store takes one view of each generation: two members are never ended at once.

        A member that still does not reach another says so again.
        """
        cluster = self._cluster
        if self._view_changes.proposing:  # what stands next may already be without one of them
            self._deadlines.set(SuspicionDue(), now + self._config.times.suspicion_s)
            return []
        # Judged once: a suspicion that still holds is said again within seconds.
        suspicions, self._by_member = self._by_member, {}
        if cluster.view is None or self._shutdown.finishing or cluster.first_answering_node() != self._config.node:
            return []
        # Words from nodes that do not answer are out of date: silence has its own judgement.
        unlinked = cluster.unlinked_nodes()
        proposal = without_a_suspect(
            cluster.view,
            suspicions,
            holders=cluster.holders,
            answering={m.id for m in cluster.members if cluster.is_alive(m.id) and m.node not in unlinked},
            begun=self._cluster.progress.begun,
        )
        if proposal.view is None:  # deaths have been proven meanwhile
            return []
        log = Log(event="end_suspect", fields={"reason": proposal.reason}, say=proposal.reason)
        return [log, *self._view_changes.propose(proposal.view)]
