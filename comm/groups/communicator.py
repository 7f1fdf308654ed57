"""The communicator: groups of members over a mesh, their operations, and edits of the view in place.

Operations of a group on one host are executed in shared memory (`shared_executor`), those of a group on several hosts
by messages (`message_executor`); tagged messages are in `point_to_point`. What fails one operation fails everything in
all groups until the next edit (`failures`): all members come out of it alike.
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
    """A view that is being taken over here. `work`: done when what is submitted belongs to it."""

    def __init__(self, work: Work, shared: SharedMemoryExecutor) -> None:
        self.work, self._shared = work, shared

    def wait(self) -> None:
        """Return when it has been taken over, and nothing of former views writes into its caller's tensors any more.

        Raises as Communicator.edit.
        """
        self.work.wait()
        self._shared.await_former()


class Executors:
    """The parts that carry out the operations of one communicator, and fail them."""

    def __init__(self, mesh: Mesh, driver: Driver) -> None:
        self.placement = Placement(mesh.me, mesh.node, one_host=mesh.all_on_one_host)
        self.failures = GroupFailures(mesh, self._end)
        self.fences = ReadValidation(mesh)
        self.host = HostMemory(mesh, driver, self.failures)
        self.shared = SharedMemoryExecutor(self.host, mesh.me)
        self.messages = MessageExecutor(self.failures, self.fences, self.placement, mesh)
        self.point_to_point = PointToPoint(self.failures, self.fences, mesh)

    def add(self, group: MemberList) -> None:
        """Raises ValueError when the name is taken."""
        self.messages.add(group)
        self.shared.add(group, in_memory=self.placement.in_memory(group.members))
        if self.failures.error is not None:
            self.shared.end(self.failures.error)

    def renew(self, generation: int, peers: Sequence[Peer], lists: Mapping[str, Sequence[str]]) -> None:
        """Begin a generation. All that was under way has been ended."""
        ids = tuple([peer.id for peer in peers])
        self.failures.renew()
        self.placement.renew(peers)
        self.host.renew()
        self.messages.renew(ids, lists)
        self.host.drop_later(self.shared.renew(generation, ids, self.placement.in_memory))

    def _end(self, error: CommError) -> None:
        # Shared memory first: then no caller that is told here finds another of its operations still waiting.
        self.shared.end(error)
        self.messages.end(error)
        self.point_to_point.end(error)


class Communicator:
    """Takes the mesh over: from now on only this object touches it, by one thread at a time.

    `newest_generation`: that any member was heard of in.
    """

    def __init__(self, mesh: Mesh, *, timeout_s: float = 60.0, trails: GroupTrails | None = None) -> None:
        """`timeout_s` holds for calls that name none. `trails`: where the last operation of each group is told."""
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

    # For any thread

    @property
    def error(self) -> CommError | None:
        """The error with which everything fails until the next edit; None when all is well."""
        return self.failures.error

    @property
    def lost(self) -> dict[str, LossCause]:
        """Members of the view that are lost, and why."""
        return self.failures.lost

    def group(self, name: str, members: Sequence[str], *, timeout_s: float | None = None) -> Group:
        """Make a group under this name; `timeout_s` holds for its calls that name none.

        Raises ValueError when the name is taken, or the list does not name me.
        """
        trail = self._trails.of(name) if self._trails is not None else None
        members_of_group = MemberList(name, self._mesh.me, members, trail)
        self._executors.add(members_of_group)
        return Group(self.dispatcher, members_of_group, timeout_s=timeout_s or self._timeout_s)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled 1-D tensor that members on this host read in place. See SharedMemory.empty."""
        return self._mesh.memory.empty(numel, dtype)

    def edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Take over a newer view, in place; `world` becomes its members in this order.

        `groups`: new lists of groups by name, the same on all members; names of groups that are not here mean nothing
        here. All other groups lose the removed members. What is under way ends with Aborted, or well where all that it
        needs had come; it has ended when this returns, so that all tensors are their owners' again. What had failed
        works again. Raises what Mesh.edit raises, and ValueError for a list that names no member of the view.
        """
        self.begin_edit(generation, members, groups).wait()

    def begin_edit(
        self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None
    ) -> PendingEdit:
        """Begin an `edit` without waiting for others: operations submitted from now on belong to the new view."""
        call = self.dispatcher.in_order(partial(self._edit, generation, members, groups or {}))
        return PendingEdit(self._driver.call_later(call), self._executors.shared)

    def abort(self, reason: str) -> None:
        """End whatever is under way in any group, on all members, with Aborted; so fails what follows until an edit."""
        self._driver.call(lambda: self.failures.break_off(Aborted(reason)))

    def close(self) -> None:
        """End the thread and the mesh; whatever is under way ends with Aborted."""
        self._driver.close()
        self._executors.shared.close()

    # See driver.Driven; by one thread at a time, as all that follows

    def hear(self, event: Event) -> None:
        if isinstance(event, Frame):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self.failures.lose(event)
        elif isinstance(event, Newer):
            self.newest_generation = event.generation

    def check(self) -> None:
        executors = self._executors
        executors.host.drop_former()
        executors.messages.check()
        overdue = executors.point_to_point.overdue()
        if overdue is not None:
            self.failures.break_off(overdue)
        if executors.shared.anybody_waits:
            executors.host.alarm.ring()  # whatever it was: they look for themselves

    def next_due_s(self) -> float:
        executors = self._executors
        return min(
            executors.messages.next_deadline_s(),
            executors.point_to_point.next_deadline_s(),
            executors.host.next_due_s(),
        )

    def stop(self, error: CommError) -> None:
        self.failures.fail(error)

    def linger(self) -> None:
        """Send what others may still need of operations that are done here."""
        deadline_s = time.monotonic() + _LINGER_S
        while self._mesh.links.unsent_bytes and time.monotonic() < deadline_s:
            self._mesh.poll(deadline_s - time.monotonic())

    def _edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]]) -> None:
        ids = tuple([peer.id for peer in members])
        _check_lists(groups, ids)
        if not set(self.world.list.members) <= set(ids):
            self._executors.fences.raise_mine()  # what the removed still read is used again from here on
        self._mesh.edit(generation, members)
        failed = self.failures.error is not None
        if not failed:  # else all that was under way has ended, and what came since has failed
            self.failures.fail(Aborted(f"the view changed to generation {generation}"))
        self.world.list.members = ids
        self._executors.renew(generation, members, groups)
        if not failed:
            self._mesh.tell_generation()  # whoever waits in the old view learns from it that nothing more comes

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
