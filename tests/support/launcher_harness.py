"""Starts real launchers from a warm fork server (torch is imported once, not per run) and waits for what they log."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from elastrain.launcher import control
from elastrain.launcher.rundir import RunDir
from tests.support.processes import in_sessions, kill_group
from tests.support.waiting import until

STUB = Path(__file__).with_name("launcher_stub.py")
_FORKS = mp.get_context("forkserver")


def launcher_process(argv: list[str], output: Path) -> None:
    """The body of a launcher's process: `elastrain *argv`, its output in a file, in a session of its own."""
    os.setsid()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(fd, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["elastrain", *argv]
    from elastrain.launcher.cli import main

    main()


class Launched:
    """A running `elastrain run` of stub workers (or of another script)."""

    def __init__(self, tmp_path: Path, *flags: str, script: Path = STUB, args: tuple[str, ...] = ()) -> None:
        _FORKS.set_forkserver_preload(["torch.distributed.elastic.multiprocessing", "elastrain.launcher.agent"])
        self.run = RunDir(path=tmp_path / "run")
        self.finish_file = tmp_path / "finish"
        self.output = tmp_path / "output"
        stub_args = ("--finish", str(self.finish_file)) if script == STUB else ()
        argv = ["run", "--standalone", "--run-dir", str(self.run.path), *flags, str(script), *stub_args, *args]
        self.process = _FORKS.Process(target=launcher_process, args=(argv, self.output))
        self.started_s = time.monotonic()
        self.process.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        pids = [e["pid"] for e in self.events("worker_start")]
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
            for pid in pids:
                kill_group(pid)

    def events(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """The event log so far; `fields` must be equal."""
        if not self.run.events.exists():
            return []
        whole = [line for line in self.run.events.read_text().splitlines(keepends=True) if line.endswith("\n")]
        events = [json.loads(line) for line in whole]
        wanted = fields | ({"event": event} if event else {})
        return [e for e in events if all(e.get(name) == value for name, value in wanted.items())]

    def wait_event(self, event: str, timeout_s: float = 40.0, **fields: Any) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            events = self.events(event, **fields)
            assert events or self.process.is_alive() or self.events("end"), self.text()
            return events

        return until(found, timeout_s, f"{event} {fields}\n{self.text()}")[0]

    def wait_view(self, generation: int, timeout_s: float = 40.0) -> list[str]:
        return list(self.wait_event("view", timeout_s, generation=generation)["members"])

    def wait_step(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.is_alive() or self.process.exitcode is None, self.text()
            return bool((self.status()["step"] or 0) >= step)

        self.wait_event("view")
        until(reached, 40, f"step {step}")

    def status(self) -> dict[str, Any]:
        return control.state(self.run)

    def pid(self, member: str) -> int:
        return int(self.wait_event("worker_start", member=member)["pid"])

    def kill(self, member: str) -> float:
        pid = self.pid(member)
        at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at_s

    def finish(self) -> int:
        self.finish_file.touch()
        return self.exit_code()

    def exit_code(self, timeout_s: float = 40.0) -> int:
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"the launcher has not ended:\n{self.text()}"
        return self.process.exitcode

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(no output)"

    def assert_nothing_left(self) -> None:
        """No process of any worker's session, no socket, no secret."""
        sessions = {e["pid"] for e in self.events("worker_start")}
        until(lambda: not in_sessions(sessions), 40, f"end of {in_sessions(sessions)}")
        assert not self.run.control.exists()
        assert not self.run.secret.exists()
        job = self.events("start")[0]["job"]
        assert f"elastrain/{job}/" not in Path("/proc/net/unix").read_text()
