"""What members' links tell of one another's ends, of silence, and of going on without somebody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastrain.comm.wire.addresses import LossCause
from tests.sim.job.member import MemberProcess

if TYPE_CHECKING:
    from tests.sim.job.world import World

TCP_SILENCE_S = 5.0
CONNECT_TIMEOUT_S = 10.0


class Meshes:
    """All links between members."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.network.on_cut.append(self._on_cut)

    def _others(self, of: str) -> Iterator[MemberProcess]:
        """Living members that have a link to it."""
        for other in self._world.living():
            if other.mesh.knows(of):
                yield other

    def died(self, process: MemberProcess, *, in_good_order: bool, silent: bool) -> None:
        one_host = self._world.schedule.one_host
        if silent:
            process.mesh.vanish()
            for other in self._others(process.id):
                other.later(TCP_SILENCE_S, lambda other=other: other.mesh.lose(process.id, "silent", LossCause.BROKEN))  # type: ignore[misc]
            return
        process.mesh.die("it has ended", LossCause.LEFT if in_good_order else LossCause.BROKEN)
        if in_good_order:
            return
        for other in list(self._others(process.id)):
            if one_host or other.node == process.node:  # its mutex proves it
                proof = lambda other=other: other.mesh.lose(process.id, "its process has ended", LossCause.DEAD)  # noqa: E731
                other.later(self._world.clock.soon(), proof)

    def leave_out(self, process: MemberProcess, member: str) -> None:
        """The process has gone on to a view without that member, and closes the link."""
        other = self._world.processes.get(member)
        if other is not None and other.alive and other.mesh.knows(process.id):
            me = process.id
            other.later(
                self._world.clock.soon(), lambda: other.mesh.lose(me, "it went on without us", LossCause.LEFT_US_OUT)
            )

    def opened(self, process: MemberProcess) -> None:
        """It opens links to all of its view; some do not come about."""
        generation = process.mesh.generation

        def look() -> None:
            if process.mesh.generation != generation:
                return
            for member in process.life.checks.ids:
                other = self._world.processes.get(member)
                if other is None or not process.mesh.knows(member):
                    continue
                if not other.alive or self._is_cut(process, other):
                    process.mesh.lose(member, "it was not reached", LossCause.UNREACHED)

        process.later(CONNECT_TIMEOUT_S, look)
        for member in list(process.mesh._peers):
            other = self._world.processes.get(member)
            if other is not None and not other.alive and not other.vanished:  # nobody listens there
                process.later(
                    self._world.clock.soon(), lambda member=member: process.mesh.lose(member, "refused", LossCause.LEFT)
                )  # type: ignore[misc]

    def turned_away(self, caller: MemberProcess, by: MemberProcess) -> None:
        """A link that one end has lost is lost for the view: whoever dials again is turned away until it gives up."""
        lose = lambda: caller.mesh.lose(by.id, "it was not reached", LossCause.UNREACHED)  # noqa: E731
        caller.later(CONNECT_TIMEOUT_S, lose)

    def _is_cut(self, one: MemberProcess, other: MemberProcess) -> bool:
        if self._world.schedule.one_host:
            return False
        return not self._world.network.reach_each_other(one.node, other.node)

    def _on_cut(self, source: str, to: str) -> None:
        """A peer that does not acknowledge for long is lost."""
        if self._world.schedule.one_host:
            return

        def look() -> None:
            if not self._world.network.is_cut(source, to):
                return
            for one in self._world.living():
                for other in self._world.living():
                    if (one.node, other.node) == (source, to):
                        self.reset(one, other, "nothing was acknowledged")

        self._world.clock.at(TCP_SILENCE_S, look)

    def reset(self, one: MemberProcess, other: MemberProcess, reason: str) -> None:
        """Both ends lose the link, and what is on its way with it."""
        for here, there in ((one, other), (other, one)):
            if here.mesh.knows(there.id):
                there.mesh.drop(here.id)
                lose = lambda here=here, there=there: here.mesh.lose(there.id, reason, LossCause.BROKEN)  # noqa: E731
                here.later(self._world.clock.soon(), lose)
