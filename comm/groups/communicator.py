"""The communicator: groups of members over a mesh, their operations, and edits of the view in place.

Operations of a group on one host are executed in shared memory (`shared_executor`), those of a group on several hosts
by messages (`message_executor`). Tagged messages are in `point_to_point`. A failure of one operation fails everything
in all groups until the next edit (`communicator_failure`), so all members see the same failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from elastrain.comm.errors import Aborted, CommError, ProtocolError
from elastrain.comm.groups.communicator_failure import GroupFailures
from elastrain.comm.groups.dispatcher import Dispatcher
from elastrain.comm.groups.driver import Driver
from elastrain.comm.groups.group import Group
from elastrain.comm.groups.host_memory import RINGS_BODY, HostMemory
from elastrain.comm.groups.members import FrameKind, MemberList, Placement, only_tensor, unpack
from elastrain.comm.groups.message_executor import MessageExecutor
from elastrain.comm.groups.point_to_point import PointToPoint
from elastrain.comm.groups.shared_executor import SharedMemoryExecutor
from elastrain.comm.groups.waits import ReadValidation
from elastrain.comm.groups.works import Work
from elastrain.comm.shm.group_trails import GroupTrails
from elastrain.comm.wire.addresses import Event, Frame, LossCause, Newer, Peer, PeerLost
from elastrain.comm.wire.mesh import Mesh

_LINGER_S = 5.0


class PendingEdit:
    """An edit of the view in progress. `work` is done once newly submitted operations belong to the new view."""

    def __init__(self, work: Work, shared: SharedMemoryExecutor) -> None:
        self.work, self._shared = work, shared

    def wait(self) -> None:
        """Wait until the view is in place and operations of former views no longer write into their tensors.

        Raises what `Communicator.edit` raises.
        """
        self.work.wait()
        self._shared.await_former()


class Executors:
    """The executors of one communicator, with what they share."""

    def __init__(self, mesh: Mesh, driver: Driver) -> None:
        self.placement = Placement(mesh.me, mesh.node, one_host=mesh.all_on_one_host)
        self.failures = GroupFailures(mesh, self._end)
        self.fences = ReadValidation(mesh)
        self.host = HostMemory(mesh, driver, self.failures)
        self.shared = SharedMemoryExecutor(self.host, mesh.me)
        self.messages = MessageExecutor(self.failures, self.fences, self.placement, mesh)
        self.point_to_point = PointToPoint(self.failures, self.fences, mesh)

    def add(self, group: MemberList) -> None:
        """Add a group. Raises ValueError if the name is taken."""
        self.messages.add(group)
        self.shared.add(group, in_memory=self.placement.in_memory(group.members))
        if self.failures.error is not None:
            self.shared.end(self.failures.error)

    def renew(self, generation: int, peers: Sequence[Peer], lists: Mapping[str, Sequence[str]]) -> None:
        """Begin a generation. All operations must have been ended."""
        ids = tuple([peer.id for peer in peers])
        self.failures.renew()
        self.placement.renew(peers)
        self.host.renew()
        self.messages.renew(ids, lists)
        self.host.drop_later(self.shared.renew(generation, ids, self.placement.in_memory))

    def _end(self, error: CommError) -> None:
        # Shared memory first: a caller that learns of the error below must not find another operation still waiting.
        self.shared.end(error)
        self.messages.end(error)
        self.point_to_point.end(error)


class Communicator:
    """Groups and their operations over a mesh. From its creation on, only this object uses the mesh.

    `newest_generation`: the newest generation of which any member has reported.
    """

    def __init__(self, mesh: Mesh, *, timeout_s: float = 60.0, trails: GroupTrails | None = None) -> None:
        """Take over `mesh` and start the communicator's thread.

        `timeout_s` is for calls without a timeout. `trails` records the last operation of each group.
        """
        self.address = mesh.address
        self.newest_generation = 0
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._trails = trails
        self._driver = Driver(mesh, self)
        self._executors = Executors(mesh, self._driver)
        self.failures = self._executors.failures
        self.dispatcher = Dispatcher(
            self._driver, mesh, self._executors.shared, self._executors.messages, self._executors.point_to_point
        )
        self.world = self.group("world", [mesh.me])
        self._driver.start()

    # Called from any thread

    @property
    def error(self) -> CommError | None:
        """The error with which everything fails until the next edit; None without a failure."""
        return self.failures.error

    @property
    def lost(self) -> dict[str, LossCause]:
        """Lost members of the view, with the cause."""
        return self.failures.lost

    def group(self, name: str, members: Sequence[str], *, timeout_s: float | None = None) -> Group:
        """Make a group with this name. `timeout_s` is for its calls without a timeout.

        Raises ValueError if the name is taken, or if the list does not contain this member.
        """
        trail = self._trails.of(name) if self._trails is not None else None
        members_of_group = MemberList(name, self._mesh.me, members, trail)
        self._executors.add(members_of_group)
        return Group(self.dispatcher, members_of_group, timeout_s=timeout_s or self._timeout_s)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled 1-D tensor that members on this host read in place, see SharedMemory.empty."""
        return self._mesh.memory.empty(numel, dtype)

    def edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Change to a newer view in place. `world` then has its members in this order.

        Operations in progress end with Aborted, or with success if everything that they need had arrived. They have
        ended when this returns, so no operation writes into a tensor any more. Operations work again after a failure.
        Raises what `Mesh.edit` raises, and ValueError for a list with a member that is not in the view.

        Args:
            generation: Number of the new view.
            members: Members of the new view.
            groups: New lists of members by group name, the same on all members. Names unknown here are ignored.
                A group without a new list loses the members that are not in the view.
        """
        self.begin_edit(generation, members, groups).wait()

    def begin_edit(
        self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None
    ) -> PendingEdit:
        """Begin an `edit` without waiting for former operations. Later operations belong to the new view."""
        call = self.dispatcher.in_order(partial(self._edit, generation, members, groups or {}))
        return PendingEdit(self._driver.call_later(call), self._executors.shared)

    def abort(self, reason: str) -> None:
        """End all operations in all groups on all members with Aborted. Later ones fail alike until an edit."""
        self._driver.call(lambda: self.failures.break_off(Aborted(reason)))

    def close(self) -> None:
        """End the thread and the mesh. Operations in progress end with Aborted."""
        self._driver.close()
        self._executors.shared.close()

    # The methods of driver.Driven, and helpers: one thread at a time

    def hear(self, event: Event) -> None:
        """Handle an event of the mesh."""
        if isinstance(event, Frame):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self.failures.lose(event)
        elif isinstance(event, Newer):
            self.newest_generation = event.generation

    def check(self) -> None:
        """Fail operations that are overdue, free memory of former views, and ring the alarm if threads wait."""
        executors = self._executors
        executors.host.drop_former()
        executors.messages.check()
        overdue = executors.point_to_point.overdue()
        if overdue is not None:
            self.failures.break_off(overdue)
        if executors.shared.anybody_waits:
            executors.host.alarm.ring()  # each waiter checks by itself what has changed

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `check` is due next."""
        executors = self._executors
        return min(
            executors.messages.next_deadline_s(),
            executors.point_to_point.next_deadline_s(),
            executors.host.next_due_s(),
        )

    def stop(self, error: CommError) -> None:
        """Fail everything, because the communicator ends."""
        self.failures.fail(error)

    def linger(self) -> None:
        """Send what other members may still need from operations that are done here, for at most `_LINGER_S`."""
        deadline_s = time.monotonic() + _LINGER_S
        while self._mesh.links.unsent_bytes and time.monotonic() < deadline_s:
            self._mesh.poll(deadline_s - time.monotonic())

    def _edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]]) -> None:
        ids = tuple([peer.id for peer in members])
        _check_lists(groups, ids)
        if not set(self.world.list.members) <= set(ids):
            self._executors.fences.raise_mine()  # memory that removed members may still read is reused from now on
        self._mesh.edit(generation, members)
        failed = self.failures.error is not None
        if not failed:  # after a failure all operations have ended already
            self.failures.fail(Aborted(f"the view changed to generation {generation}"))
        self.world.list.members = ids
        self._executors.renew(generation, members, groups)
        if not failed:
            self._mesh.tell_generation()  # so members that wait in the old view learn that nothing more comes

    def _receive(self, frame: Frame) -> None:
        try:
            self._understand(frame)
        except ProtocolError as error:
            reason = f"it broke the protocol: {error}"
            self.failures.lose(PeerLost(member=frame.source, reason=reason, at_s=time.monotonic()))

    def _understand(self, frame: Frame) -> None:
        executors = self._executors
        match frame.kind:
            case FrameKind.PART:
                executors.messages.hear_part(frame)
            case FrameKind.FENCE:
                executors.fences.hear(frame)
            case FrameKind.RINGS:
                (group,), _ = unpack(RINGS_BODY, frame)
                executors.shared.hear_rings(group, frame.source, only_tensor(frame))
            case FrameKind.ABORT:
                executors.failures.hear_abort(frame)
            case FrameKind.MESSAGE:
                executors.point_to_point.hear(frame)
            case _:
                raise ProtocolError(f"a frame of unknown kind {frame.kind:#x}")


def _check_lists(groups: Mapping[str, Sequence[str]], members: Sequence[str]) -> None:
    for name, wanted in groups.items():
        if not set(wanted) <= set(members) or len(set(wanted)) != len(wanted):
            raise ValueError(f"group {name!r} must list members of the view {members}, each once; got {wanted}")
