"""Hands the calls of groups to their executors, in the order of the calls. For any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from elastrain.comm.collectives.devices import is_far
from elastrain.comm.collectives.reducing import MakeOperation
from elastrain.comm.groups.driver import Driver
from elastrain.comm.groups.members import Address, MemberList
from elastrain.comm.groups.message_executor import MessageExecutor
from elastrain.comm.groups.point_to_point import PendingReceive, PointToPoint
from elastrain.comm.groups.shared_executor import SharedMemoryExecutor
from elastrain.comm.groups.works import OperationRequest, Work
from elastrain.comm.wire.mesh import Mesh
from elastrain.device import DeviceEvent, device_of


class Dispatcher:
    """Dispatch of calls: to shared memory if all members are on this host, else to messages."""

    def __init__(
        self,
        driver: Driver,
        mesh: Mesh,
        shared: SharedMemoryExecutor,
        messages: MessageExecutor,
        point_to_point: PointToPoint,
    ) -> None:
        self._driver, self._mesh = driver, mesh
        self._shared, self._messages, self._point_to_point = shared, messages, point_to_point
        self._ahead_lock = threading.Lock()
        self._ahead = 0  # calls that wait for the thread, and that later operations must not overtake

    def submit(
        self,
        group: MemberList,
        make: MakeOperation,
        timeout_s: float,
        *,
        inline: bool,
        barrier: bool = False,
        landed: list[DeviceEvent] | None = None,
    ) -> Work:
        """Execute an operation after those submitted before; with `inline` in this thread, if possible.

        `landed`: see `Work`.
        """
        self._driver.check_open()
        deadline_s = time.monotonic() + timeout_s
        work = Work(landed)
        request = OperationRequest(work=work, make=make, deadline_s=deadline_s, timeout_s=timeout_s, barrier=barrier)
        if self._ahead:  # an edit: it belongs to the view that comes; or an operation that waits for one
            self._driver.post(self.in_order(lambda: self._hand_on(group, request)))
        elif not self._shared.submit(group, request, inline=inline):
            self._driver.post(lambda: self._messages.enqueue(group, request))
        return request.work

    def _hand_on(self, group: MemberList, request: OperationRequest) -> None:
        if not self._shared.submit(group, request, inline=False):
            self._messages.enqueue(group, request)

    def in_order(self, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap the call so that operations submitted before it has run do not overtake it."""

        def run() -> None:
            try:
                call()
            finally:
                with self._ahead_lock:
                    self._ahead -= 1

        with self._ahead_lock:
            self._ahead += 1
        return run

    def post(self, group: MemberList, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Send a tagged message to rank `to`. The tensor is copied before this returns."""
        work, staged = Work(), self._mesh.memory.scratch(max(tensor.numel(), 1), tensor.dtype)[: tensor.numel()]
        device_of(tensor.device).copy_out(tensor, staged.view(tensor.shape)).synchronize()
        address = Address(group=group.number, source=group.me, tag=tag)
        to_member = group.members[to]
        group.trail.called(f"send to {to_member}, tag {tag}")
        self._driver.post(lambda: self._point_to_point.post(work, address, to_member, staged))
        return work

    def receive(self, group: MemberList, out: torch.Tensor, of: int | None, tag: int, timeout_s: float) -> Work:
        """Await a tagged message from rank `of` (None: from any rank)."""
        source = None if of is None else group.members[of]
        missing = f"nothing tagged {tag} from {'anybody' if source is None else source} within {timeout_s} s"
        group.trail.called(f"recv of {source or 'anybody'}, tag {tag}")
        deadline_s = time.monotonic() + timeout_s
        submitted = device_of(out.device).record() if is_far(out) else None
        pending = PendingReceive(work=Work(), out=out, deadline_s=deadline_s, description=missing, submitted=submitted)
        address = Address(group=group.number, source=source, tag=tag)
        sources = tuple(group.members) if source is None else (source,)

        def run() -> None:
            self._mesh.connect(sources)
            self._point_to_point.receive(address, pending)

        self._driver.post(run)
        return pending.work
