"""Starts real jobs with `elastrain run`, kills what the test names, and reads what they log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from elastrain.launcher.cli.commands.inject import ask
from elastrain.launcher.faults import grammar
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.rundir import RunDir
from tests.support import warm
from tests.support.processes import in_sessions, kill_group
from tests.support.training import SCRIPT, Run, environment
from tests.support.waiting import until

ELASTRAIN = (sys.executable, "-m", "elastrain.launcher")
STUB = Path(__file__).with_name("launcher_stub.py")
Held = Literal["--slow-while", "--finish", ""]
"""The option with which a script is given the file that holds it up: while it exists, until it exists, or none."""


class NodesJob:
    """One `elastrain run`: a job of one node, all simulated nodes of a job, or one node of it.

    It is held up until `hurry`: a training script is slow, a stub does not end.

    `inside`: what to write before the command, to run it on another host.
    """

    def __init__(
        self,
        tmp_path: Path,
        *options: str,
        arguments: tuple[str, ...],
        name: str = "run",
        inside: tuple[str, ...] = (),
        script: Path = SCRIPT,
        held: Held = "--slow-while",
    ) -> None:
        self.run = RunDir(path=tmp_path / name)
        self._slow, self._finish = tmp_path / "slow", tmp_path / "finish"
        self._slow.touch()
        hold = {"--slow-while": (held, str(self._slow)), "--finish": (held, str(self._finish)), "": ()}[held]
        self._output = tmp_path / f"{name}.log"
        command = [*inside, *ELASTRAIN, "run", *options, "--run-dir", str(self.run.path), str(script)]
        with self._output.open("wb") as file:
            self.process = warm.Popen(
                [*command, *arguments, *hold],
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> NodesJob:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            for pid in self.sessions():
                kill_group(pid)
            self.process.kill()
            self.process.wait(10)

    def hurry(self) -> None:
        self._slow.unlink(missing_ok=True)
        self._finish.touch()

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def events(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        if not self.run.events.exists():
            return []
        lines = self.run.events.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        wanted = fields | ({"event": event} if event else {})
        return [e for e in events if all(e.get(name) == value for name, value in wanted.items())]

    def wait(self, event: str, timeout_s: float = 90.0, **fields: Any) -> dict[str, Any]:
        return self.wait_all(event, timeout_s=timeout_s, **fields)[0]

    def wait_all(self, event: str, *, count: int = 1, timeout_s: float = 90.0, **fields: Any) -> list[dict[str, Any]]:
        """All such events, once there are so many."""

        def found() -> list[dict[str, Any]]:
            has_ended = self.process.poll() is not None  # first: it may say so and end while the log is read
            events = self.events(event, **fields)
            assert len(events) >= count or not has_ended, f"no {event} {fields}\n{self.text()}"
            return events if len(events) >= count else []

        try:
            return until(found, timeout_s, f"{event} {fields}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def wait_view(self, generation: int) -> list[str]:
        return list(self.wait("view", generation=generation)["members"])

    def wait_members(self, *nodes: str, after: int, timeout_s: float = 90.0) -> int:
        """A view later than generation `after` whose members are on these nodes, one on each; its generation."""

        def found() -> int:
            assert self.process.poll() is None, self.text()
            state = self.status()
            here = sorted(m["node"] for m in state["members"] if m["rank"] is not None)
            return int(state["generation"]) if state["generation"] > after and here == sorted(nodes) else 0

        return until(found, timeout_s, f"{nodes} after generation {after}\n{self.text()}")

    def wait_step(self, step: int, timeout_s: float = 90.0) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.text()
            return bool((self.status()["step"] or 0) >= step)

        self.wait("view", timeout_s)
        until(reached, timeout_s, f"step {step}\n{self.text()}")

    def wait_copied(self, timeout_s: float = 90.0) -> None:
        """Until every shard has its backups again, so that another member may be lost."""

        def whole() -> bool:
            assert self.process.poll() is None, self.text()
            told = self.status()["redundancy"]
            return told.startswith("every shard survives") and "copying" not in told

        until(whole, timeout_s, f"backups of every shard\n{self.text()}")

    def status(self) -> dict[str, Any]:
        return operator_messages.state(self.run)

    def agent(self, node: str) -> int:
        return int(self.events("start", source=f"agent:{node}")[-1]["pid"])

    def sessions(self) -> list[int]:
        """Leaders of all process groups of the job: agents and workers."""
        return [e["pid"] for e in self.events() if e["event"] in ("start", "worker_start")]

    def pid(self, member: str) -> int:
        return int(self.wait("worker_start", member=member)["pid"])

    def kill(self, *members: str) -> None:
        """Workers alone, with SIGKILL."""
        for pid in [self.pid(member) for member in members]:
            os.kill(pid, signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """Every worker's group and the agent, at once."""
        workers = [e["pid"] for e in self.events("worker_start", source=f"agent:{node}")]
        for pid in [self.agent(node), *workers]:
            kill_group(pid)

    def inject(self, line: str) -> None:
        answer = ask(self.run, grammar.parse(line))
        assert answer.ok, answer

    def signal_etcd(self, number: int) -> None:
        os.kill(self.etcd(), number)

    def etcd(self) -> int:
        """The embedded server's process."""
        data = str(self.run.path / "etcd" / "data").encode()
        return next(int(p.parent.name) for p in Path("/proc").glob("[0-9]*/cmdline") if data in _bytes(p))

    def finish(self, timeout_s: float = 270.0) -> Run:
        self.hurry()
        return self.end(timeout_s)

    def end(self, timeout_s: float = 270.0) -> Run:
        """What has become of it, when it ends by itself."""
        return Run(self.process.wait(timeout_s), self.text(), self.run.path)

    def assert_nothing_left(self) -> None:
        """No process of the job, no socket, no secret of the run's own."""
        sessions = set(self.sessions()) | {self.process.pid}
        until(lambda: not in_sessions(sessions), 40, f"end of {in_sessions(sessions)}")
        folder = str(self.run.path).encode()
        left = [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if folder in _bytes(p)]
        assert not left
        job = self.events("start")[0]["job"]
        assert f"elastrain/{job}/" not in Path("/proc/net/unix").read_text()
        # Of what was killed, guardians take the files: each node's its own.
        until(lambda: not self._files() & {"control.sock", "secret", "etcd"}, 40, f"end of files: {self._files()}")

    def _files(self) -> set[str]:
        return {path.name for path in self.run.path.rglob("*")}


def stub_job(tmp_path: Path, *options: str, arguments: tuple[str, ...] = ()) -> NodesJob:
    """Its workers have no model: they speak with their agent, and misbehave on request."""
    return NodesJob(tmp_path, *options, arguments=arguments, script=STUB, held="--finish")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""
