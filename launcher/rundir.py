"""The folder of one run: what lies where, how a run is found, and what stays of it.

Nothing of a run is written elsewhere. Only files here; the environment's ELASTRAIN_HOME is read here.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """Paths in a run's folder (mode 0700)."""

    path: Path

    @property
    def secret(self) -> Path:
        """32 random bytes, mode 0600; gone after the end."""
        return self.path / "secret"

    @property
    def control(self) -> Path:
        """The operator's socket, mode 0600; gone after the end."""
        return self.path / "control.sock"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def state(self) -> Path:
        """What `status` shows after the end."""
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def offload(self) -> Path:
        """Profiles of offloading, a file per member."""
        return self.path / "offload"

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Whole or not at all."""
        temporary = self.path / ".run.json.new"
        temporary.write_text(json.dumps(state))
        temporary.replace(self.state)

    def read_state(self) -> dict[str, Any]:
        """Raises ConfigError if there is none that can be read."""
        try:
            state = json.loads(self.state.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} holds no readable run ({error})") from None
        if not isinstance(state, dict):
            raise ConfigError(f"{self.state} is not a run's state")
        return state


def runs_folder() -> Path:
    """`$ELASTRAIN_HOME/runs`, by default under ~/.local/state/elastrain."""
    home = os.environ.get("ELASTRAIN_HOME")
    return (Path(home) if home else Path.home() / ".local/state/elastrain") / "runs"


def create(path: Path | None, job: str) -> RunDir:
    """Make the folder and the secret. Raises ConfigError if another run's files are there or it can not be made.

    A folder that is there already and not empty keeps its mode, but others must not be able to write into it.
    """
    folder = (path or runs_folder() / job).absolute()
    run = RunDir(path=folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if run.events.exists() or run.state.exists():
            raise ConfigError(f"{folder} already holds a run: choose another --run-dir, or remove it")
        if not any(folder.iterdir()):
            folder.chmod(0o700)
        elif folder.stat().st_mode & 0o022:
            raise ConfigError(f"others may write into {folder}: choose a folder of your own as --run-dir")
        descriptor = os.open(run.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} can not be made: {error}") from None
    return run


def find(run: str | None) -> RunDir:
    """By folder, by job id, or the newest. Raises ConfigError."""
    if run is None:
        folders = [path.parent for path in runs_folder().glob("*/events.jsonl")]
        if not folders:
            raise ConfigError(f"there is no run in {runs_folder()}: name the folder that was given as --run-dir")
        return RunDir(path=max(folders, key=_started_at))
    for folder in (Path(run), runs_folder() / run):
        if (folder / "events.jsonl").exists():
            return RunDir(path=folder.absolute())
    raise ConfigError(f"there is no run {run!r}: neither a run's folder nor a job id in {runs_folder()}")


def _started_at(folder: Path) -> float:
    """Wall-clock time of the first event; runs without a readable one are the oldest."""
    try:
        with (folder / "events.jsonl").open() as lines:
            return float(json.loads(lines.readline())["wall"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def listen(run: RunDir) -> socket.socket:
    """The operator's socket, listening."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        with _short(run.control) as name:
            listener.bind(name)
    finally:
        os.umask(before)
    listener.listen()
    return listener


def connect(run: RunDir, timeout_s: float) -> socket.socket | None:
    """A connection to the run's agent; None if it no longer runs."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with _short(run.control) as name:
            sock.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    return sock


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for the path that fits into a socket address (108 bytes), however long the path is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
