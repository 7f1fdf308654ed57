"""A limit that is changed while somebody waits or begins, and the order of reading ahead: records made by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from elastrain.offload import ActivationOffload, OffloadConfig
from elastrain.offload.activations.manager import SpillManager
from elastrain.offload.activations.pass_records import Origin, SpillRecord
from elastrain.offload.activations.spill_policy import Planner
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.residency import State
from elastrain.offload.planning.profile import PassProfile
from tests.support.memory_engine import MemoryEngine

SIZE_BYTES = 1 << 20


class KeepsAll(Planner):
    """Nothing leaves before it has to."""

    def spills(self, index: int) -> bool:
        return False

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """Learns nothing."""


class Interrupted(MemoryEngine):
    """Calls `during` within its first write."""

    def __init__(self, during: Callable[[], None]) -> None:
        super().__init__()
        self._during: Callable[[], None] | None = during

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        during, self._during = self._during, None
        if during is not None:
            during()
        super().write(offset_bytes, views)


class Node:
    """A stand-in for what a graph node holds."""


NODES: dict[SpillRecord, Node] = {}


def saved(manager: SpillManager, tensor: torch.Tensor) -> SpillRecord:
    """Save as a hook does, for a node that lives until `release`."""
    storage, node = tensor.untyped_storage(), Node()
    record = SpillRecord(storage, Origin(storage, version=0, dtype="", module="", pinned=False))
    manager.save(record, node)
    NODES[record] = node
    return record


def release(record: SpillRecord) -> None:
    """Let go of the node."""
    del NODES[record]


def test_a_limit_lowered_while_a_forward_waits_for_room_is_kept_not_refused() -> None:
    device = Device(Interrupted(lambda: manager.set_limit(2 * SIZE_BYTES)), threads=1)
    manager = SpillManager([device], limit_bytes=4 * SIZE_BYTES, plan=KeepsAll(4 * SIZE_BYTES), deadline_s=30.0)
    manager.begin_pass()
    records = [
        saved(manager, torch.full((SIZE_BYTES,), n, dtype=torch.uint8))
        for n in range(4)  # the fourth waits for the first one's write, which lowers the limit
    ]
    manager.end_forward(quietly=False)
    assert manager.stats().live_bytes <= 2 * SIZE_BYTES
    for number, record in reversed(list(enumerate(records))):
        bytes_back = torch.empty(0, dtype=torch.uint8).set_(manager.need(record))
        assert torch.equal(bytes_back, torch.full((SIZE_BYTES,), number, dtype=torch.uint8))
        release(record)
    manager.begin_pass()
    manager.close()


def test_reading_ahead_follows_the_order_in_which_the_last_backward_asked() -> None:
    """What is saved first may be needed second: an encoder's output, by the last layer of the decoder."""
    order = (3, 0, 2, 1)
    device = Device(MemoryEngine(), threads=1)
    manager = SpillManager([device], limit_bytes=2 * SIZE_BYTES, plan=Planner(2 * SIZE_BYTES), deadline_s=30.0)
    for number in range(3):
        manager.begin_pass()
        records = [
            saved(manager, torch.empty(SIZE_BYTES, dtype=torch.uint8))
            for _ in range(4)  # each save waits until all before it are on the device
        ]
        manager.end_forward(quietly=False)
        first, *rest = (records[index] for index in order)
        manager.need(first)
        coming = [index for index in range(3) if records[index].state in (State.READING, State.RELOADED)]
        assert coming == ([0] if number else [2])  # there is room for one more
        release(first)
        for record in rest:
            manager.need(record)
            release(record)
    manager.close()


def test_a_limit_that_is_set_while_the_first_forward_begins_is_that_of_the_same_manager() -> None:
    """Both open the devices if nobody has: one does, and the other waits."""
    opened, again = threading.Event(), threading.Event()

    class SlowToOpen(ActivationOffload):
        def _open_devices(self) -> list[Device]:
            if opened.is_set():
                again.set()
            opened.set()
            again.wait(0.2)
            return super()._open_devices()

    offload = SlowToOpen(OffloadConfig(dirs=("/",), memory_limit=8 * SIZE_BYTES), engines=[MemoryEngine()])
    entering = threading.Thread(target=offload.stats)
    entering.start()
    opened.wait()
    offload.set_memory_limit(4 * SIZE_BYTES)
    entering.join()
    assert not again.is_set(), "opened twice"
    assert offload.stats().limit_bytes == 4 * SIZE_BYTES
    offload.close()
