"""A process that is forked from a warm one behaves as one that is started cold: one suite for both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.processes import die_with_parent, tied
from elastrain.launcher.namespaces.switch import lacking
from tests.support import warm

TIMEOUT_S = 60.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(warm.ROOT), "OF_THE_TEST": "é = 1"}
Start = Callable[..., "subprocess.Popen[Any]"]

SHOWS_ITSELF = """
import atexit, json, os, pathlib, sys
def words(name):
    return pathlib.Path("/proc/self", name).read_bytes().decode().rstrip("\\0").split("\\0")
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": globals().get("__file__"), "path": sys.path, "folder": os.getcwd(),
    "environment": dict(os.environ), "in /proc": sorted(words("environ")), "command": words("cmdline"),
    "executable": sys.executable, "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "group": os.getpgrp() == os.getpgid(os.getppid()), "descriptors": sorted(os.listdir("/proc/self/fd"))[:4],
    "main": sys.modules["__main__"].__dict__ is globals(), "annotations": str((lambda: 1).__annotations__),
}), flush=True)
atexit.register(print, "at exit", file=sys.stderr)
"""


@pytest.fixture(params=["cold", "warm"])
def start(request: pytest.FixtureRequest) -> Start:
    return subprocess.Popen if request.param == "cold" else warm.Popen


def _done(start: Start, *arguments: str, stdin: str = "", **how: Any) -> tuple[int, str, str]:
    how = {"env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    with start([sys.executable, *arguments], stdin=subprocess.PIPE, text=True, **how) as process:
        output, errors = process.communicate(stdin, timeout=TIMEOUT_S)
    return process.returncode, output, errors


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "shows.py"
    path.write_text(SHOWS_ITSELF)
    return str(path)


def _commands(script: str) -> list[list[str]]:
    return [[script, "a", "b c"], ["-u", script], ["-c", SHOWS_ITSELF, "a"], ["-m", Path(script).stem, "--flag"]]


@pytest.mark.parametrize("which", range(4))
def test_both_see_the_same_of_themselves(tmp_path: Path, script: str, which: int) -> None:
    seen = []
    for start in (subprocess.Popen, warm.Popen):
        code, output, errors = _done(start, *_commands(script)[which], cwd=tmp_path, start_new_session=True)
        assert (code, errors) == (0, "at exit\n")
        seen.append(json.loads(output))
    cold, forked = seen
    # A command line begins with the same words; in a forked one, the rest of the fork server's is blank.
    assert forked == cold
    assert cold["parent"] == os.getpid() and cold["session"]
    assert cold["environment"]["OF_THE_TEST"] == "é = 1"


def test_it_stays_in_its_parents_group_unless_it_gets_a_session(start: Start, script: str) -> None:
    _, output, _ = _done(start, script)
    told = json.loads(output)
    assert told["group"] and not told["session"]


def test_a_signal_that_its_parent_holds_back_waits_in_it(start: Start) -> None:
    lists = "print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    shows = f"import os, signal; os.kill(os.getpid(), signal.SIGTERM); {lists}"
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = start([sys.executable, "-c", shows], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
    assert (process.communicate()[0], process.returncode) == ("15\n", 0)


def test_who_has_started_it_finds_it_in_its_session(start: Start) -> None:
    """A forked one was told of before it had left the fork server's: a priority that was set at once was lost."""
    for _ in range(20 if start is warm.Popen else 1):
        waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with start(waits, env=ENVIRONMENT, stdin=subprocess.PIPE, start_new_session=True) as process:
            session = os.getsid(process.pid)
        assert (process.returncode, session) == (0, process.pid)


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("raise KeyError('k')", 1, "KeyError: 'k'"),
        ("import os; os._exit(7)", 7, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_it_ends_with_the_code_and_the_words_of_its_end(start: Start, body: str, code: int, last: str) -> None:
    returned, output, errors = _done(start, "-c", body)
    assert (returned, output) == (code, "")
    assert (errors.splitlines() or [""])[-1].strip() == last


def test_what_is_to_be_done_at_the_end_is_what_the_program_asked_for(start: Start) -> None:
    """What modules had asked for while they were imported is done by cold processes alone: it takes 60 ms."""
    before = (
        "before = sum(each.atexit for each in weakref.finalize._registry); " if start is warm.Popen else "before = 0; "
    )
    mine = "thing = type('Thing', (), {})(); weakref.finalize(thing, print, 'the end', before)"
    assert _done(start, "-c", "import weakref; " + before + mine) == (0, "the end 0\n", "")


def test_a_traceback_names_the_script_and_nothing_else(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "script.py"
    path.write_text("def fail():\n    1 / 0\nfail()\n")
    _, _, errors = _done(start, str(path))
    assert [line.strip() for line in errors.splitlines() if line.startswith("  File")] == [
        f'File "{path}", line 3, in <module>',
        f'File "{path}", line 2, in fail',
    ]


def test_streams_go_where_they_are_sent(start: Start) -> None:
    body = "import sys; print(input()); print('error', file=sys.stderr)"
    assert _done(start, "-c", body, stdin="said\n") == (0, "said\n", "error\n")
    code, output, errors = _done(start, "-u", "-c", body, stdin="said\n", stderr=subprocess.STDOUT)
    assert (code, output, errors) == (0, "said\nerror\n", None)


def test_descriptors_are_passed_under_their_numbers(start: Start) -> None:
    ours, theirs = os.pipe()
    body = f"import os; os.write({theirs}, b'through'); print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])"
    code, output, errors = _done(start, "-c", body, pass_fds=[theirs])
    os.close(theirs)
    assert (code, errors, os.read(ours, 100)) == (0, "", b"through")
    os.close(ours)
    assert output == f"{sorted([0, 1, 2, 3, theirs])[:4]}\n"


ENDS_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
sys.path.insert(0, {root!r})
from tests.support import warm
import subprocess
body = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print('ready', flush=True); time.sleep(60)"
start = {start}
child = start([sys.executable, "-c", body], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["subprocess.Popen", "warm.Popen"])
def test_a_death_signal_comes_when_the_parent_dies(how: str) -> None:
    """Were the fork server its parent, it would live on."""
    code, output, _ = _done(subprocess.Popen, "-c", ENDS_WITH_ITS_PARENT.format(root=str(warm.ROOT), start=how))
    assert code == -signal.SIGKILL
    deadline_s = time.monotonic() + TIMEOUT_S
    while _lives(int(output)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_who_asks_for_a_death_signal_alone_starts_warm_and_gets_it() -> None:
    body = (
        "import ctypes, sys; found = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(found));"
        "print('torch' in sys.modules, found.value)"
    )
    asked = partial(die_with_parent, signal.SIGTERM)
    assert _done(warm.Popen, "-c", body, preexec_fn=asked) == (0, f"True {signal.SIGTERM}\n", "")
    code, output, _ = _done(warm.Popen, "-c", body, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    assert (code, output) == (0, f"False {signal.SIGTERM}\n"), "whatever else is to be called is called, cold"


def test_who_is_tied_to_its_parent_starts_warm_and_gets_the_death_signal() -> None:
    """All workers of jobs are: started cold, each would import torch for itself."""
    body = (
        "import ctypes, sys; found = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(found));"
        "print('torch' in sys.modules, found.value)"
    )
    with warm.Popen(tied([sys.executable, "-c", body]), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert output == f"True {signal.SIGKILL}\n"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_it_enters_the_network_namespace_that_its_command_names(start: Start) -> None:
    name, body = f"elastrain-warm-{os.getpid()}", "import os; print(os.stat('/proc/self/ns/net').st_ino, os.getpid())"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        command = ["ip", "netns", "exec", name, sys.executable, "-c", body]
        with start(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert output.split() == [str(os.stat(f"/var/run/netns/{name}").st_ino), str(process.pid)]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def test_random_numbers_differ_from_process_to_process(start: Start) -> None:
    body = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.initial_seed())"
    first, second = (_done(start, "-c", body)[1].split() for _ in range(2))
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    "arguments",
    [("-c", "import sys; print('torch' in sys.modules)"), ("-m", "elastrain.launcher", "--help")],
)
def test_what_is_asked_for_with_other_settings_at_the_start_starts_cold(arguments: Sequence[str]) -> None:
    whole = [sys.executable, *arguments]
    assert warm._can_be_warm(whole, ENVIRONMENT)
    for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_CBWR", "LD_PRELOAD"):
        assert not warm._can_be_warm(whole, {**ENVIRONMENT, name: "5"}), name
    assert not warm._can_be_warm([sys.executable, "-I", *arguments], ENVIRONMENT)
    assert not warm._can_be_warm(["sh", "-c", "true"], ENVIRONMENT)
    assert not warm._can_be_warm(whole, {**ENVIRONMENT, "PYTHONPATH": "/elsewhere"})


def test_what_somebody_else_took_in_says_so_and_ends() -> None:
    """It waited for ever for a parent that it could not get any more, and whoever had asked for it did so, too."""
    warm.run([sys.executable, "-c", ""], timeout=TIMEOUT_S, env=ENVIRONMENT)  # there is a server now
    order = warm._order((sys.executable, "-c", ""), ENVIRONMENT, os.getcwd(), (), session=False)
    with pytest.raises(OSError, match=f"is now a child of {os.getpid()}, not of {os.getppid()}$") as told:
        warm._started().fork(replace(order, parent=os.getppid()), [0, 1, 2])
    pid = int(str(told.value).split()[1])
    assert os.waitpid(pid, 0) == (pid, 1 << 8)
    assert _done(warm.Popen, "-c", "print(1)") == (0, "1\n", ""), "the server serves on"


def test_threads_that_come_first_together_get_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the one ended the adoption of what the other had just forked."""
    both, made = threading.Barrier(2), list[object]()

    def start_cold() -> object:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "_start_cold", start_cold)
    monkeypatch.setattr(warm.atexit, "register", lambda _: None)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: warm._started(), range(2)))
    assert len(made) == 1
    assert found == [made[0]] * 2
