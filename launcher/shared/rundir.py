"""The folder of one run: its paths, its creation, how commands find it, its control socket, and its event log.

A run writes no files elsewhere. The event log has one JSON object per line, see `base.line_log`. Every line has `t`
(monotonic seconds of this host), `wall` (seconds since 1970), `source` and `event`; other fields belong to the event.
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
    """Paths in a run's folder (mode 0700).

    A simulated node has a folder of its own inside its run's folder, `whole`.
    """

    path: Path
    whole: Path | None = None
    secret_file: Path | None = None
    """Secret file that existed before this run, and outlives it."""

    @property
    def owns_secret(self) -> bool:
        """True if the secret was made for this run and is deleted with it."""
        return self.secret_file is None

    @property
    def secret(self) -> Path:
        """File with 32 random bytes, mode 0600. The run deletes it at its end if it is its own."""
        return self.secret_file or self.path / "secret"

    @property
    def journals(self) -> Path:
        """Folder into which the members of all nodes on this machine write."""
        return self.whole or self.path

    @property
    def control(self) -> Path:
        """The operator's socket, mode 0600; deleted at the end."""
        return self.path / "control.sock"

    @property
    def events(self) -> Path:
        """The event log."""
        return self.journals / "events.jsonl"

    @property
    def state(self) -> Path:
        """File with the state that `status` shows after the end."""
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        """Folder of the workers' output."""
        return self.journals / "logs"

    @property
    def stacks(self) -> Path:
        """Folder with the stacks of all threads when a member hung, one file per member."""
        return self.journals / "stacks"

    @property
    def offload(self) -> Path:
        """Folder with profiles of offloading, one file per member."""
        return self.path / "offload"

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace the state file atomically."""
        line_files.replace(self.state, json.dumps(state).encode())

    def read_state(self) -> dict[str, Any]:
        """Return the contents of the state file. Raises ConfigError if it is missing or unreadable."""
        try:
            state = json.loads(self.state.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path} holds no readable run ({error})") from None
        if not isinstance(state, dict):
            raise ConfigError(f"{self.state} is not a run's state")
        return state


def home() -> Path:
    """Return `$ELASTRAIN_HOME`, or ~/.local/state/elastrain if it is unset."""
    named = process_environment.home()
    return Path(named) if named else Path.home() / ".local/state/elastrain"


def runs_folder() -> Path:
    """Return the folder that holds the folders of runs by default."""
    return home() / "runs"


def create(path: Path | None, job: str, *, secret_file: Path | None = None) -> RunDir:
    """Create the folder and, unless `secret_file` names one, the secret.

    Raises ConfigError if another run's files are there or the folder cannot be made. An existing folder that is not
    empty keeps its mode, but must not be writable for other users.
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
    """Write a new secret atomically. Raises OSError; FileExistsError if the file exists already."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = line_files.create(temporary)
    try:
        with os.fdopen(descriptor, "wb") as made:
            made.write(secrets.token_bytes(SECRET_BYTES))
        os.link(temporary, file)
    finally:
        temporary.unlink()


def of_node(run: RunDir, node: str) -> RunDir:
    """Return the folder of a simulated node inside its run's folder, and create it if necessary."""
    folder = run.path / "nodes" / node
    for each in (folder.parent, folder):  # `parents=True` would create the parents with another mode
        each.mkdir(mode=0o700, exist_ok=True)
    return RunDir(path=folder, whole=run.path, secret_file=run.secret)


def nodes_of(run: RunDir) -> list[RunDir]:
    """Return the folders of all simulated nodes, or the run's own folder if it has none."""
    folders = sorted((run.path / "nodes").glob("*/"))
    return [RunDir(path=folder, whole=run.path, secret_file=run.secret) for folder in folders] or [run]


def find(run: str | None) -> RunDir:
    """Return the run with this folder or job id, or the newest run if `run` is None. Raises ConfigError."""
    if run is None:
        folders = newest_first()
        if not folders:
            raise ConfigError(f"there is no run in {runs_folder()}: name the folder that was given as --run-dir")
        return RunDir(path=folders[0])
    for folder in (Path(run), runs_folder() / run):
        if is_file(folder / "events.jsonl"):
            return RunDir(path=folder.absolute())
    raise ConfigError(f"there is no run {run!r}: neither a run's folder nor a job id in {runs_folder()}")


def newest_first() -> list[Path]:
    """Return the folders of all runs that lie where runs lie by default, the newest first."""
    return sorted((path.parent for path in runs_folder().glob("*/events.jsonl")), key=started_at, reverse=True)


def is_file(path: Path) -> bool:
    """Return True if the path is a file. Invalid names and unreadable folders count as no file."""
    try:
        return path.is_file()
    except OSError:
        return False


def started_at(folder: Path) -> float:
    """Return the wall-clock time of the first event, or 0 if no event can be read."""
    try:
        with (folder / "events.jsonl").open() as lines:
            return float(json.loads(lines.readline())["wall"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def listen(run: RunDir) -> socket.socket:
    """Create the operator's socket and listen on it."""
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
    """Connect to the run's agent. Returns None if it no longer runs."""
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
    """Yield a name for the path that fits into a socket address (108 bytes), however long the path is."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class EventLog:
    """Writer of one process to the event log. `source` names the process."""

    def __init__(self, path: Path, source: str) -> None:
        self._log, self._source = LineLog(path), source

    def write(self, event: str, **fields: Any) -> None:
        """Append one event, with the time and the source."""
        head = {"t": round(time.monotonic(), 6), "wall": round(time.time(), 6), "source": self._source, "event": event}
        # The head is merged last, so that a worker's fields cannot forge it.
        self._log.write({**fields, **head})

    def close(self) -> None:
        """Close the file."""
        self._log.close()
