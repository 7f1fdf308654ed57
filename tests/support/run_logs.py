"""Logs of runs that never were: a folder with an event log and journals, as agents and members write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP_S = 0.1
ZERO_S, WALL = 1000.0, 1_800_000_000.0


class WrittenRun:
    """A run of two members. Each incident kills the second one, and a new member takes its place."""

    def __init__(self, folder: Path, incidents: int, steps_each: int = 20) -> None:
        self.folder = folder
        self.now_s, self.step, self.generation = ZERO_S, 0, 0
        self.lines: dict[str, list[str]] = {}
        self.event("start", job="storm", workers=2)
        self.members = ["m0", "m1"]
        for member in self.members:
            self.event("worker_start", member=member, pid=7)
        self.now_s += 2.0
        self.view("all 2 workers are ready")
        for number in range(incidents):
            self.steps(steps_each)
            self.lose(f"m{number + 2}")
        self.steps(steps_each)

    def event(self, event: str, **fields: Any) -> None:
        self._write("events", {**fields, "t": self.now_s, "wall": WALL + self.now_s - ZERO_S, "event": event})

    def journal(self, member: str, event: str, **fields: Any) -> None:
        self._write(member, {"t": self.now_s, "member": member, "event": event, **fields})

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        self.lines.setdefault(name, []).append(json.dumps(line, separators=(",", ":")))

    def view(self, reason: str) -> None:
        self.generation += 1
        self.event("view", generation=self.generation, members=self.members, reason=reason)
        self.now_s += 0.002
        for member in self.members:
            self.journal(member, "edit", generation=self.generation)
        self.now_s += 0.010
        for member in self.members:
            self.journal(member, "resumed", generation=self.generation)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now_s += STEP_S
            for member in self.members:
                self.journal(member, "micro_batch", step=self.step, micro_batch=0)
                self.journal(member, "passed", step=self.step, loss=2.0 / (1 + self.step))
                self.journal(member, "work", memory_bytes=10**8 + self.step, memory_limit_bytes=2 * 10**8)
            if self.step % 7 == 0:
                self.journal("m0", "audit", step=self.step, micro_batch=0)
            self.step += 1
        self.event("checkpoint", step=self.step, reason="", took_s=0.2, size_bytes=9)

    def lose(self, newcomer: str) -> None:
        """Lose the second member 5 ms after a fault, agree 3 ms later, and let a newcomer in."""
        lost = self.members.pop()
        self.journal(lost, "fault", kind="kill", step=self.step, phase="backward")
        self.now_s += 0.005
        self.event("death", member=lost, detected_by="mutex", detected_s=self.now_s - 0.001, handled_s=self.now_s)
        self.now_s += 0.003
        self.view(f"{lost} lost")
        self.event("worker_start", member=newcomer, pid=8)
        self.steps(2)
        self.members.append(newcomer)
        self.view(f"{newcomer} joined")
        self.event("window", window="opened", shards=4)
        self.now_s += 0.050
        self.event("window", window="closed", after_s=0.05)

    def end(self) -> WrittenRun:
        for member in self.members:
            self.event("finished", member=member, step=self.step, digest="d")
        self.event("end", exit_code=0, reason=f"finished after step {self.step - 1}")
        return self

    def write(self, *, cut: bool = False) -> Path:
        """Write the files. `cut`: each ends in half a line."""
        (self.folder / "members").mkdir(parents=True, exist_ok=True)
        for name, lines in self.lines.items():
            path = self.folder / ("events.jsonl" if name == "events" else f"members/{name}.jsonl")
            path.write_text("\n".join(lines) + ('\n{"t":1,"ev' if cut else "\n"))
        return self.folder
