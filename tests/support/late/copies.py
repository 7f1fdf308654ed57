"""Copies between the host and the device; one that is `non_blocking` comes as late as its stream allows.

A copy out takes its values when it is submitted and delivers them when somebody waits; until then its destination
holds NaN. A copy in reads the host's memory when somebody waits, or when work on the device needs the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.late import kernels
from tests.support.late.memory import LOCK, Block, alias_of, block_of, is_late, span_of
from tests.support.late.order import STREAMS, Clock, Stream, Timed, race, submit, this_thread, wait_for

Addresses = tuple[int, int]
"""First byte of host memory, and the byte behind the last."""


@dataclass(eq=False, kw_only=True)
class LateCopy:
    """A copy that has been submitted to a stream."""

    what: str
    stream: Stream
    tick: int
    clock: Clock
    host: Addresses
    block: Block | None
    """Destination of a copy in; None: it writes the host's memory."""
    work: Callable[[], object]
    is_done: bool = False

    def carry_out(self) -> None:
        """Copy now, after the earlier copies out that write what this one reads."""
        if self.is_done:
            return
        self.is_done = True
        if self.block is not None:
            self.block.fills.remove(self)
        for other in _overlapping(self.host):
            if other.block is None and self.clock.get(other.stream.number, 0) >= other.tick:
                other.carry_out()
        self.work()


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy from or to the device, or within it."""
    if is_late(self) and is_late(src):
        this_thread().counts["copies_within"] += 1
        kernels.run(torch.ops.aten.copy_.default, self, src)
        return self
    if not src.numel():
        return self
    device, host = (self, src) if is_late(self) else (src, self)
    is_out = device is src
    what = f"copy {'out' if is_out else 'in'}"
    kernels.refuse_in_capture(what)
    with LOCK:
        spans = [(block_of(device), span_of(device))]
        stream, tick = submit(what, spans if is_out else [], [] if is_out else spans)
        addresses = _addresses(host)
        _check_host(what, stream, addresses, is_out)
        counts = this_thread().counts
        counts["copies_out" if is_out else "copies_in"] += 1
        counts["bytes_out" if is_out else "bytes_in"] += src.numel() * src.element_size()
        clock, block = Clock(stream.clock), None if is_out else spans[0][0]
        late = LateCopy(
            what=what, stream=stream, tick=tick, clock=clock, host=addresses, block=block, work=_work(self, src, stream)
        )
        if block is not None:
            block.fills.append(late)
        if is_out or non_blocking:
            stream.copies.append(late)
        else:
            late.carry_out()  # the host may use its memory again, but the stream may be one that never ends
        if non_blocking:
            _poison(alias_of(self) if block is not None else self)
    if not non_blocking:
        wait_for(clock, stream.hang)
    return self


def _work(self: Tensor, src: Tensor, stream: Stream) -> Callable[[], object]:
    """Return what copies the values: those that the device has now, or those that the host has then."""
    with Timed(stream):
        if is_late(self):
            target, source = alias_of(self), src
        else:
            target, source = self, torch.empty(src.shape, dtype=self.dtype).copy_(alias_of(src))
    target, source = target.detach(), source.detach()

    def work() -> None:
        with Timed(stream):
            target.copy_(source)

    return work


def _poison(target: Tensor) -> None:
    """Fill memory with values that are wrong, so that nobody takes them for those that are still to come."""
    target = target.detach()
    if target.dtype.is_floating_point or target.dtype.is_complex:
        target.fill_(float("nan"))
    elif target.dtype is torch.bool:
        target.logical_not_()
    else:
        target.fill_(torch.iinfo(target.dtype).max)


def _addresses(host: Tensor) -> Addresses:
    start, stop = span_of(host)
    base = host.untyped_storage().data_ptr()
    return (base + start, base + stop)


def _overlapping(host: Addresses) -> Iterator[LateCopy]:
    for stream in STREAMS:
        for copy in list(stream.copies):
            if copy.host[0] < host[1] and host[0] < copy.host[1]:
                yield copy


def _check_host(what: str, stream: Stream, host: Addresses, is_out: bool) -> None:
    """Compare the host memory of a copy with that of the copies that have not landed."""
    for other in _overlapping(host):
        if (is_out or other.block is None) and stream.clock.get(other.stream.number, 0) < other.tick:
            race(
                f"{what} on stream {stream.number} {'writes' if is_out else 'reads'} host memory of a {other.what} on "
                f"stream {other.stream.number} that has not landed, and stream {stream.number} has not waited for it"
            )
