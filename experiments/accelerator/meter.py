"""Counts what a worker asks of `late`, and writes a line of facts for each step."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from elastrain import protocol as p
from elastrain.buffers.buffer_book import BufferBook
from elastrain.protocol.messages import Partial, Publish
from elastrain.runtime.engine.sender import Sender
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.tensors.executor import Executor
from elastrain.runtime.tensors.tensor_arithmetic import TensorArithmetic
from experiments.accelerator.models import FIRST, Training

SINGLE_BYTES = 64
"""Copies of so few bytes are single numbers, such as a loss, a norm or checksums: they do not count as carried."""
OF_BACKUPS = ("states_on_host.py", "shard_states.py")
"""Files that copy the states, and the gradients for them, which a member keeps for other members' shards."""
LOOP, SAMPLES = "MainThread", "device_reads.py"
"""The loop's thread, and where it reads the step's samples of parameters, which no peer reads."""


class NoMeter:
    """A meter where there is no device."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


class Counts(Counter[str]):
    """A thread's counts, whose changes the meter is told."""

    def __init__(self, thread: str, meter: Meter) -> None:
        super().__init__()
        self._thread, self._meter = thread, meter

    def __setitem__(self, name: str, value: int) -> None:
        added = value - self.get(name, 0)
        super().__setitem__(name, value)
        if name in ("waits", "bytes_out", "bytes_in"):
            self._meter.note(name, added, self._thread)


class Meter:
    """Facts of this process: races, descriptors, waits of the loop's thread, bytes that travel, and peaks."""

    def __init__(self, path: Path, training: Training) -> None:
        from tests.support import late
        from tests.support.late import order

        self._late, self._file, self._training = late, path.open("a", buffering=1), training
        self._order = order
        self._facts: dict[str, Any] = {}
        """Figures of the present step."""
        self._totals: Counter[str] = Counter()
        self._carried_at: Counter[str] = Counter()
        """Bytes that travel between members that read each other's memory in place, by the lines that copy them."""
        self._doing = threading.local()
        """The kind of message that the thread sends."""
        self._seen: set[Any] = set()
        self._is_batch = False
        self._late_bytes: list[tuple[int, int]] = []
        """Kernels of the loop's thread, and bytes of a copy of gradients that was submitted then."""
        self._backward = [0, 0]
        self.buffer_bytes, self.states_bytes, self._told_s, self._device_s = 0, 0, 0.0, 0.0
        made = order.Host
        order.Host = lambda name, stream: made(name, stream, counts=Counts(name, self))  # type: ignore[assignment,misc]
        self._watch_the_books()

    # ---------------------------------------------------------------------------------------------- told by the loop

    def begin_step(self, number: int) -> None:
        if number == FIRST:
            torch.get_device_module("late").reset_peak_memory_stats()
        self._facts = {"step": number, "micro_batches": 0, "waits_batch": 0, "where": {}}
        self._waits, self._late_bytes = 0, []

    def begin(self) -> None:
        if not self._facts["micro_batches"]:
            self._waits_before = self._waits
        self._facts["micro_batches"] += 1
        self._begun_s = self._order.DEFAULT.busy_s
        self._is_batch = True  # what is copied in now is the batch

    def backward_begins(self) -> None:
        self._is_batch = False
        self._backward[0] = self._kernels()

    def end(self) -> None:
        self._device_s += self._order.DEFAULT.busy_s - self._begun_s
        self._backward[1] = self._kernels()
        self._facts["waits_batch"] = self._waits - self._waits_before  # up to the last backward

    def end_step(self) -> None:
        begun, ended = self._backward
        late_from = begun + 0.98 * (ended - begun)
        self._facts["waits_around"] = self._waits - self._facts["waits_batch"]
        self._totals["gradient_bytes"] += sum(size for _, size in self._late_bytes)
        self._totals["tail_bytes"] += sum(size for kernels, size in self._late_bytes if kernels > late_from)
        self._write(self._facts)

    def close(self) -> None:
        module = torch.get_device_module("late")
        peak = {
            "peak_bytes": module.max_memory_allocated(),
            "buffer_bytes": self.buffer_bytes,
            "states_bytes": self.states_bytes,
        }
        times = {"told_s": self._told_s, "device_s": self._device_s, "carried_at": self._carried_at}
        self._write({"step": self._training.steps, **peak, **times, **self._totals})

    def _write(self, facts: dict[str, Any]) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        self._file.write(json.dumps({**facts, "races": self._late.races(), "descriptors": descriptors}) + "\n")

    # ----------------------------------------------------------------------------------------- told by the device

    def note(self, name: str, added: int, thread: str) -> None:
        """Take note of a wait or a copy, in the thread that asks for it."""
        if not self._facts or (name != "waits" and added <= SINGLE_BYTES):
            return
        place = _place() if thread == LOOP else ""
        if name == "waits":
            if thread == LOOP:
                self._waits += added
                self._facts["where"][place] = self._facts["where"].get(place, 0) + added
        elif not (self._is_batch and thread == LOOP) and not place.startswith(SAMPLES):
            self._totals[name] += added
            if self._training.shared:
                self._carried_at[f"{name}: {_place()}"] += added
                self._totals["backup_bytes"] += added if _is_of_a_backup() else 0
            if name == "bytes_out" and getattr(self._doing, "what", "") == "Partial":
                self._late_bytes.append((self._kernels(), added))

    def _kernels(self) -> int:
        return int(self._late.stats(LOOP)["kernels"])

    def _watch_the_books(self) -> None:
        """Count the bytes that have to travel: offered partials, published shards, and those of others."""
        send, payload, carry_out = Sender.send, BufferBook.payload, BufferBook.carry_out
        new_buffer, computed = TensorArithmetic.new_buffer, LoopHeartbeat.computed
        check_is_over = Executor.check_is_over

        def watched_computed(heartbeat: LoopHeartbeat, took_s: float) -> None:
            self._told_s += took_s
            computed(heartbeat, took_s)

        def watched_send(sender: Sender, command: Any) -> None:
            self._doing.what = type(command.message).__name__
            try:
                send(sender, command)
            finally:
                self._doing.what = ""

        def watched_payload(books: BufferBook, message: Any) -> Any:
            tensors = payload(books, message)
            if isinstance(message, Partial):
                names = [("out", message.step, message.block, message.node, *lane) for lane in message.lanes]
                self._want("wanted_out", names, tensors[1:])
            elif isinstance(message, Publish):
                self._want("wanted_out", [("out", message.step, shard) for shard in message.shards], tensors)
            return tensors

        def watched_carry_out(books: BufferBook, command: Any) -> Any:
            if isinstance(command, p.Keep) and command.payload is not None:
                name = ("in", command.step, command.block, command.node, command.shard, command.lane)
                self._want("wanted_in", [name], [command.payload[1 + command.index]])
            elif isinstance(command, p.TakeParameters):
                self._want("wanted_in", [object()], [command.payload[command.index]])
            return carry_out(books, command)

        def watched_new_buffer(arithmetic: TensorArithmetic, like: Any) -> Any:
            self.buffer_bytes += like.nbytes
            return new_buffer(arithmetic, like)

        def watched_commit(executor: Executor) -> None:
            self.states_bytes = executor.states_bytes()[0]  # those of backups lie in the host's memory: there are none
            check_is_over(executor)

        Executor.check_is_over = watched_commit  # type: ignore[method-assign]
        LoopHeartbeat.computed = watched_computed  # type: ignore[method-assign]
        Sender.send, TensorArithmetic.new_buffer = watched_send, watched_new_buffer  # type: ignore[method-assign]
        BufferBook.payload, BufferBook.carry_out = watched_payload, watched_carry_out  # type: ignore[method-assign]

    def _want(self, key: str, names: list[Any], tensors: list[torch.Tensor]) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            if name not in self._seen:
                self._seen.add(name)
                self._totals[key] += tensor.nbytes


def _place() -> str:
    """Return the innermost lines of elastrain and of the script that lead to the caller."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        file = frame.f_code.co_filename
        if "/elastrain/" in file or "/experiments/accelerator/train" in file:
            found.append(f"{Path(file).name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def _is_of_a_backup() -> bool:
    """Return True if the caller copies to or from what a member keeps in its host memory for other members' shards."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith(OF_BACKUPS):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
