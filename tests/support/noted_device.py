"""A device module of torch that computes nothing and notes the calls, and the port to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastrain.device.accelerators import Accelerator


class NotedModule:
    """In place of `torch.cuda`: what was called, in order. `now` is the current stream of every thread."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "compute"
        self.capturing = False
        self.options: list[dict[str, Any]] = []
        """One entry for each event that was made."""

    def current_stream(self, _device: torch.device) -> Any:
        return self.now

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def Stream(self, _device: torch.device, *, priority: int) -> str:
        assert priority < 0, "sums of what was moved would wait for what computes"
        return "side"

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def Event(self, **options: bool) -> Any:
        self.options.append(options)
        calls = self.calls

        class Event:
            behind = ""

            def record(self, stream: str) -> None:
                self.behind = stream

            def wait(self, stream: str) -> None:
                calls.append(f"{stream} waits for {self.behind}")

            def query(self) -> bool:
                return True

            def elapsed_time(self, end: Any) -> float:
                """In milliseconds, as torch's."""
                return 1500.0

            def synchronize(self) -> None:
                calls.append(f"{self.behind} is reached")

        return Event()

    def port(self, device_type: str = "cuda") -> Accelerator:
        return Accelerator(torch.device(device_type, 0), self)
