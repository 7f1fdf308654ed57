"""The folder of one run: what lies where, how a run is found, and what stays of it.

Nothing of a run is written elsewhere. Only files here; the environment's ELASTRAIN_HOME is read here.

The event log of a run: one JSON object per line, see `base.line_log`.

Fields of every line: `t` (monotonic seconds of this host), `wall` (seconds since 1970), `source`, `event`; the rest
belongs to the event.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrain.base import line_files
from elastrain.base.line_files import LineLog
from elastrain.errors import ConfigError
from elastrain.launcher.shared import process_environment

SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """Paths in a run's folder (mode 0700). A simulated node has its own folder in that of its run: `whole`."""

    path: Path
    whole: Path | None = None
    secret_file: Path | None = None
    """A secret that was there before this run, and stays."""

    @property
    def owns_secret(self) -> bool:
        return self.secret_file is None

    @property
    def secret(self) -> Path:
        """32 random bytes, mode 0600; gone after the end if it is the run's own."""
        return self.secret_file or self.path / "secret"

    @property
    def journals(self) -> Path:
        """Where the members of all nodes of this machine write."""
        return self.whole or self.path

    @property
    def control(self) -> Path:
        """The operator's socket, mode 0600; gone after the end."""
        return self.path / "control.sock"

    @property
    def events(self) -> Path:
        return self.journals / "events.jsonl"

    @property
    def state(self) -> Path:
        """What `status` shows after the end."""
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        return self.journals / "logs"

    @property
    def stacks(self) -> Path:
        """What threads were at when a member hung, a file per member."""
        return self.journals / "stacks"

    @property
    def offload(self) -> Path:
        """Profiles of offloading, a file per member."""
        return self.path / "offload"

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Whole or not at all."""
        line_files.replace(self.state, json.dumps(state).encode())

    def read_state(self) -> dict[str, Any]:
        """Raises ConfigError if there is none that can be read."""
        try:
            state = json.loads(self.state.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path} holds no readable run ({error})") from None
        if not isinstance(state, dict):
            raise ConfigError(f"{self.state} is not a run's state")
        return state


def home() -> Path:
    """`$ELASTRAIN_HOME`, by default ~/.local/state/elastrain."""
    named = process_environment.home()
    return Path(named) if named else Path.home() / ".local/state/elastrain"


def runs_folder() -> Path:
    return home() / "runs"


def create(path: Path | None, job: str, *, secret_file: Path | None = None) -> RunDir:
    """Make the folder and, unless a file of it is named, the secret.

    Raises ConfigError if another run's files are there or it cannot be made.
    A folder that is there already and not empty keeps its mode, but others must not be able to write into it.
    """
    folder = (path or runs_folder() / job).absolute()
    run = RunDir(path=folder, secret_file=secret_file)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if run.events.exists() or run.state.exists():
            raise ConfigError(f"{folder} already holds a run: choose another --run-dir, or remove it")
        if not any(folder.iterdir()):
            folder.chmod(0o700)
        elif folder.stat().st_mode & 0o022:
            raise ConfigError(f"others may write into {folder}: choose a folder of your own as --run-dir")
        if run.owns_secret:
            make_secret(run.secret)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be made: {error}") from None
    return run


def make_secret(file: Path) -> None:
    """Whole or not at all. Raises OSError; FileExistsError if it is there already."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = line_files.create(temporary)
    try:
        with os.fdopen(descriptor, "wb") as made:
            made.write(secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, file)
    finally:
        temporary.unlink()


def of_node(run: RunDir, node: str) -> RunDir:
    """The folder of a simulated node in its run's, made if it is not there."""
    folder = run.path / "nodes" / node
    for each in (folder.parent, folder):  # not as `parents`, which get another mode
        each.mkdir(mode=0o700, exist_ok=True)
    return RunDir(path=folder, whole=run.path, secret_file=run.secret)


def nodes_of(run: RunDir) -> list[RunDir]:
    """The folders of simulated nodes; the run's own if it has none."""
    folders = sorted((run.path / "nodes").glob("*/"))
    return [RunDir(path=folder, whole=run.path, secret_file=run.secret) for folder in folders] or [run]


def find(run: str | None) -> RunDir:
    """By folder, by job id, or the newest. Raises ConfigError."""
    if run is None:
        folders = [path.parent for path in runs_folder().glob("*/events.jsonl")]
        if not folders:
            raise ConfigError(f"there is no run in {runs_folder()}: name the folder that was given as --run-dir")
        return RunDir(path=max(folders, key=_started_at))
    for folder in (Path(run), runs_folder() / run):
        if is_file(folder / "events.jsonl"):
            return RunDir(path=folder.absolute())
    raise ConfigError(f"there is no run {run!r}: neither a run's folder nor a job id in {runs_folder()}")


def is_file(path: Path) -> bool:
    """Whether it is a file. A name that no file can have, or a folder that may not be read, holds none for us."""
    try:
        return path.is_file()
    except OSError:
        return False


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


class EventLog:
    """What one process writes there; `source` says which."""

    def __init__(self, path: Path, source: str) -> None:
        self._log, self._source = LineLog(path), source

    def write(self, event: str, **fields: Any) -> None:
        head = {"t": round(time.monotonic(), 6), "wall": round(time.time(), 6), "source": self._source, "event": event}
        # The head wins: a worker's own fields must not forge it.
        self._log.write({**fields, **head})

    def close(self) -> None:
        self._log.close()
