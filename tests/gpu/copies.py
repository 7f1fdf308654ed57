"""Copies between a device and the host: those of a running member, and the rates of large ones alone."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.comm.shm.segments import SharedMemory
from elastrain.device import DeviceEvent, DevicePort, device_of
from elastrain.device.accelerators import Accelerator
from elastrain.runtime.carrying.tensor_memory import PinInPlace
from experiments.accelerator.models import Training

Span = tuple[float, float]
LEAST_BYTES = 64
"""Copies of fewer bytes, such as losses, are not followed."""


class Copies:
    """The copies of a member on an accelerator, and when it computed, by the device's clock."""

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._noted: list[tuple[int, DeviceEvent, DeviceEvent]] = []
        self._computed: list[tuple[DeviceEvent, DeviceEvent]] = []
        self._begun: DeviceEvent | None = None
        self._began_s = 0.0
        if isinstance(port, Accelerator):
            for name in ("out", "in"):
                setattr(port, f"copy_{name}", self._following(name, getattr(port, f"copy_{name}")))

    def _following(self, stream: str, copy: Callable[..., DeviceEvent]) -> Callable[..., DeviceEvent]:
        def followed(source: Tensor, target: Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
            after = after or self._port.record()
            with self._port.side_stream(stream):
                after.wait()
                begun = self._port.record(timing=True)
            landed = copy(source, target, after)
            with self._port.side_stream(stream):
                ended = self._port.record(timing=True)
            if source.nbytes >= LEAST_BYTES:
                self._noted.append((source.nbytes, begun, ended))
            return landed

        return followed

    def mark(self) -> DeviceEvent:
        """Return an event of the loop's stream, with a time."""
        return self._port.record(timing=True)

    def begin(self) -> None:
        """Forget everything so far: the timed steps begin."""
        self._noted.clear()
        self._computed.clear()
        self._begun = self.mark()

    def computed(self, begun: DeviceEvent) -> None:
        """Note that a micro-batch was submitted after `begun`."""
        self._computed.append((begun, self.mark()))

    def figures(self, steps: int) -> dict[str, Any]:
        """Return seconds per step of copies, and of those during which the member computed nothing; bytes per step."""
        if not self._port.is_host:
            torch.get_device_module(self._port.device).synchronize()
        base = self._begun
        assert base is not None
        copied = [(base.elapsed_s(begun), base.elapsed_s(ended)) for _, begun, ended in list(self._noted)]
        computed = [(base.elapsed_s(begun), base.elapsed_s(ended)) for begun, ended in self._computed]
        total_s = length(copied)
        both_s = total_s + length(computed) - length([*copied, *computed])
        return {
            "copies_s": total_s / steps,
            "exposed_s": (total_s - both_s) / steps,
            "copied_bytes": sum(size for size, _, _ in self._noted) // steps,
        }


def length(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans, in seconds."""
    total, until = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total


def rates(port: DevicePort, size_bytes: int) -> dict[str, float]:
    """Return bytes per second of copies out and in: of memory that members share, pinned by torch, and not pinned."""
    device = port.empty(size_bytes, torch.uint8).zero_()
    memory = SharedMemory(size_bytes, huge_pages=False)
    memory.pin = PinInPlace(port, lambda *_, **fields: print(fields))
    shared = memory.scratch(size_bytes, torch.uint8)
    pinned, unpinned = port.empty_pinned(size_bytes, torch.uint8), torch.empty(size_bytes, dtype=torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "shared out": lambda: port.copy_out(device, shared).wait(),
        "shared in": lambda: port.copy_in(shared, device).wait(),
        "pinned out": lambda: pinned.copy_(device, non_blocking=True),
        "pinned in": lambda: device.copy_(pinned, non_blocking=True),
        "unpinned out": lambda: unpinned.copy_(device),
        "unpinned in": lambda: device.copy_(unpinned),
    }
    return {name: max(_rate(port, copy, size_bytes) for _ in range(3)) for name, copy in ways.items()}


def _rate(port: DevicePort, copy: Callable[[], object], size_bytes: int) -> float:
    count = 4
    port.synchronize()
    began_s = time.perf_counter()
    for _ in range(count):
        copy()
    port.synchronize()
    return count * size_bytes / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--megabytes", type=int, default=256)
    args = parser.parse_args()
    from experiments.accelerator.train import prepare_device

    prepare_device(Training(device=args.device))
    print(json.dumps(rates(device_of(torch.device(args.device)), args.megabytes << 20)))


if __name__ == "__main__":
    main()
