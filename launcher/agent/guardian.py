"""The guardian: a small process that cleans up after a launcher or agent that was killed.

It kills the remaining processes, and removes files, network namespaces and control groups. A process that gets SIGKILL
cannot stop what it has started: its workers would train on, or sleep forever. So each launcher and each agent has a
guardian in a session of its own, which waits for the end of a pipe that only its owner can write to. That process runs
this file by its path, with the standard library alone: nothing of elastrain may be imported here.

`Guardian` is the owner's side. `GuardianWatch` starts another guardian if the process is killed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_LOOK_AT_LEAST_S = 0.5
"""Minimum seconds of the search. A process that was being started shows its mark only after its exec."""
_LOOK_AT_MOST_S = 10.0
_LOOK_AGAIN_S = 0.02


class Guardian:
    """The owner's side. Its processes are marked, and end with the owner, as does every session that is watched.

    `kind` distinguishes the marks of an agent from those of a launcher with several agents on this machine. Every
    process with `mark` in its environment is killed, so `environment`, which is the guardian's own, must contain no
    mark.
    """

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        self.mark = {f"ELASTRAIN_{kind}_MARK": secrets.token_hex(16)}
        self._environment = environment
        self._told: list[tuple[str, object]] = []
        """Instructions so far, to be repeated to a replacement process."""
        self._process = self._start()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *exc: object) -> None:
        """Kill the guardian's process, because the owner has cleaned up by itself."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it had been killed before
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Process id of the guardian. The process is not reaped before `begin_again` or the end."""
        return self._process.pid

    def begin_again(self) -> None:
        """Start a replacement for a killed process, and repeat all instructions to it."""
        self.__exit__()
        self._process = self._start()
        told, self._told = self._told, []
        for what, value in told:
            self._tell(what, value)

    def watch(self, session: int) -> None:
        """Kill this session, too.

        Needed for processes that may overwrite their environment, for instance to set a title.
        """
        self._tell("watch", session)

    def unwatch(self, session: int) -> None:
        """Forget a session. Call this before its leader is reaped, because the number may be used again."""
        self._tell("unwatch", session)
        self._told = [each for each in self._told if each not in (("watch", session), ("unwatch", session))]

    def remove(self, path: Path) -> None:
        """Delete a file that exists now, but no later file of that name; or a folder, even if it is made later."""
        identity = _identity(path)
        self._tell("remove", [str(path), identity])

    def remove_namespace(self, name: str) -> None:
        """Delete a network namespace, even if it is created later."""
        self._tell("namespace", name)

    def remove_group(self, path: Path) -> None:
        """Delete a control group, if it still exists then."""
        self._tell("group", str(path))

    def _start(self) -> subprocess.Popen[bytes]:
        [[name, value]] = self.mark.items()
        return subprocess.Popen(
            # The mark is an argument, so the guardian knows it even if its owner dies at once.
            [sys.executable, "-I", "-S", __file__, f"{name}={value}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It must not carry a mark itself, nor keep the owner's folder busy.
            env=self._environment,
            cwd="/",
            start_new_session=True,
        )

    def _tell(self, what: str, value: object) -> None:
        self._told.append((what, value))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([what, value]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed, and its replacement gets all instructions


def _identity(path: Path) -> list[int] | None:
    """Return what distinguishes a file from a later one of the same name; None for a folder or a missing file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return None if path.is_dir() else [found.st_dev, found.st_ino, found.st_ctime_ns]


def _guard(mark: bytes) -> None:
    """Read instructions until the owner has died, then clean up.

    An owner that ends normally kills this process first.
    """
    assert b"=" in mark, "without a mark, every process would seem to bear it"
    sessions, paths = set[int](), list[tuple[Path, list[int] | None]]()
    namespaces, groups = list[str](), list[str]()
    for line in sys.stdin.buffer:
        what, value = json.loads(line)
        if what == "watch":
            sessions.add(value)
        elif what == "unwatch":
            sessions.discard(value)
        elif what == "namespace":
            namespaces.append(value)
        elif what == "group":
            groups.append(value)
        else:
            paths.append((Path(value[0]), value[1]))
    _end_all(mark, sessions)
    _remove_groups(groups)
    for path, identity in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif identity is not None and _identity(path) == identity:
            path.unlink(missing_ok=True)
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _end_all(mark: bytes, sessions: Collection[int]) -> None:
    began_s = time.monotonic()
    left = True
    while time.monotonic() < began_s + (_LOOK_AT_MOST_S if left else _LOOK_AT_LEAST_S):
        left = False
        for pid in _living(mark, sessions):
            left = True
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)


def _remove_groups(groups: Collection[str]) -> None:
    """Delete the control groups. Retries, because a process that just ended may keep its group for a moment."""
    left, began_s = set(groups), time.monotonic()
    while left and time.monotonic() < began_s + _LOOK_AT_MOST_S:
        for group in list(left):
            try:
                os.rmdir(group)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            left.discard(group)
        time.sleep(_LOOK_AGAIN_S)


def _living(mark: bytes, sessions: Collection[int]) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(session) in sessions or mark in (folder / "environ").read_bytes().split(b"\0")):
                yield int(folder.name)
        except OSError:
            continue  # it has just ended, or is another user's


if __name__ == "__main__":
    _guard(os.fsencode(sys.argv[1]))
