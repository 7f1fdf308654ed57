"""The loader processes: killed at any moment, they are started again and lose nothing; nothing of theirs stays."""

from __future__ import annotations

import gc
import math
import os
import random
import re
import resource
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrain.runtime.loader import loading, packing
from elastrain.runtime.loader.fork_server import ForkServer, ForkServerEndedError
from elastrain.runtime.loader.loading import LoaderProcesses, LoadFailed
from elastrain.runtime.loader.packing import Request
from tests.support import warm

torch.set_num_threads(1)


@contextmanager
def _processes(load: Callable[[int, int], Any], count: int = 1) -> Iterator[LoaderProcesses]:
    processes = LoaderProcesses(load, count)
    try:
        yield processes
    finally:
        processes.close()


def _next(processes: LoaderProcesses) -> tuple[Request, Any]:
    request, packed = _came(processes)
    assert isinstance(packed, memoryview)
    return request, packing.unpack(packed)


def _came(processes: LoaderProcesses) -> tuple[Request, Any]:
    """One result: tests that have asked for several take them one by one."""
    while True:
        for result in processes.receive(wait_s=math.inf):
            return result


def _pids(processes: LoaderProcesses) -> list[int]:
    """By slot, once all have been started."""
    server = processes._fork_server._process.pid
    deadline_s = time.monotonic() + 20
    while len(pids := _children(server)) != processes._count:  # one that is dead is there until it is reaped
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return pids


def _children(pid: int | None) -> list[int]:
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _descriptors() -> int:
    """Open ones of the process that asks."""
    return len(os.listdir("/proc/self/fd"))


def _pair(step: int, micro_batch: int) -> dict[str, Any]:
    """One that is mapped and one that is read."""
    return {"x": torch.full((200_000 * (step % 2) + 1,), float(micro_batch)), "open": _descriptors()}


def test_no_descriptor_is_left_behind_by_any_number_of_micro_batches() -> None:
    gc.collect()  # what earlier tests have left would be let go of in the middle
    with _processes(_pair) as processes:
        processes.send((0, 0))
        held = [_next(processes)]
        here = _descriptors()
        for number in range(1, 1001):
            processes.send((number, number))
            held.append(_next(processes))
            assert _descriptors() <= here
            assert held[-1][1]["open"] <= held[0][1]["open"]
            del held[1:-50]
        assert [float(thing["x"][-1]) for _, thing in held] == [float(request[1]) for request, _ in held]
    assert _descriptors() < here, "the sockets are still open"


@pytest.mark.slow
def test_a_process_killed_at_any_moment_is_started_again_and_nothing_is_lost_or_comes_twice() -> None:
    moments = random.Random(3)
    for victim in range(30):
        told: list[str] = []
        processes = LoaderProcesses(_pair, 2, told.append)
        with closing(processes):
            pid = _pids(processes)[victim % 2]
            killer = threading.Timer(moments.uniform(0, 0.004), os.kill, (pid, signal.SIGKILL))
            for number in range(5):
                processes.send((number, 0))
            killer.start()
            wanted = set(range(5))
            while not told or wanted:
                for request, packed in processes.receive(wait_s=math.inf if not told or wanted else 0):
                    wanted.remove(request[0])  # KeyError: it came twice
                    assert isinstance(packed, memoryview)
                    assert len(packing.unpack(packed)["x"]) == 200_000 * (request[0] % 2) + 1
                    if not told:
                        number += 1
                        wanted.add(number)
                        processes.send((number, 0), urgent=number % 3 == 0)
            killer.join()
            assert len(told) == 1 and f"(pid {pid}) was killed by SIGKILL" in told[0]
            assert len(_pids(processes)) == 2


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "ended by itself with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), "was ended by SIGUSR1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL; .* out of memory"),
    ],
)
def test_a_micro_batch_that_kills_two_processes_is_named_with_how_they_ended(
    end: Callable[[], None], words: str
) -> None:
    told: list[str] = []
    with closing(LoaderProcesses(lambda step, m: end() if m == 3 else m, 1, told.append)) as processes:
        processes.send((5, 2))
        processes.send((5, 3))
        assert _next(processes)[1] == 2
        request, error = _came(processes)
        assert request == (5, 3) and isinstance(error, RuntimeError)
        assert re.search(f"2 loader processes died .* micro-batch 3 of step 5; the last one {words}", str(error))
        processes.send((5, 4))
        assert _next(processes)[1] == 4, "what others have to load goes on"
    assert len(told) == 2 and "it is started again" in told[0]


def test_what_the_dead_had_taken_is_loaded_by_the_others_and_the_waiting_stay_in_order() -> None:
    gate = _Gate()
    with _processes(lambda step, m: gate.wait() if m == 0 else m) as processes:
        for micro_batch in range(4):
            processes.send((0, micro_batch))
        gate.reached()
        pid = _pids(processes)[0]
        os.kill(pid, signal.SIGKILL)
        assert _is_gone(pid), "else the dying one might go through the gate that is opened for the next"
        gate.open()
        assert [_next(processes)[0] for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_processes_that_die_before_they_load_anything_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_next_request", lambda urgent, planned: os._exit(7))
    with _processes(lambda step, m: m) as processes:
        processes.send((0, 0))
        with pytest.raises(RuntimeError, match=r"5 loader processes have died and loaded nothing .* exit code 7"):
            _came(processes)


def test_the_end_of_the_fork_server_itself_is_an_error_and_no_wait() -> None:
    with _processes(lambda step, m: m) as processes:
        pids = _pids(processes)
        processes._fork_server.kill()
        with pytest.raises(
            ForkServerEndedError, match=r"from which loader processes are started .* was killed by SIGKILL"
        ):
            _came(processes)
        for pid in pids:
            assert _is_gone(pid)


def test_a_fork_server_whose_owner_goes_without_hearing_of_the_dead_ends_in_silence(capfd: Any) -> None:
    """The kernel resets the socket then: a killed worker left Python's traceback on the screen."""
    server = ForkServer(lambda slot: None, 1)
    assert select.select([server], [], [], 20)[0]
    server._orders.close()
    server._process.join(20)
    assert (server._process.exitcode, capfd.readouterr().err) == (0, "")


def _is_gone(pid: int) -> bool:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.005)
    return False


def test_signals_to_the_whole_group_are_the_training_process_s_affair() -> None:
    with _processes(lambda step, m: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)]) as p:
        p.send((0, 0))
        assert _next(p) == ((0, 0), [None, None])


@pytest.mark.slow
def test_a_program_that_ends_without_close_takes_them_along_and_a_fork_of_it_does_not() -> None:
    code = """
        import os, signal, sys
        from elastrain.runtime.loader.loading import LoaderProcesses
        processes = LoaderProcesses(lambda step, m: m or signal.pause(), 1)
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        processes.send((0, 1))
        next(processes.receive(wait_s=60))
        processes.send((0, 0))
    """
    root = Path(__file__).resolve().parents[3]
    done = warm.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, timeout=180, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_training_process_that_is_killed_takes_them_along_without_a_word() -> None:
    """The worker's screen showed a traceback of its loaders, now and then, whenever a worker was killed."""
    code = """
        import os, signal
        from elastrain.runtime.loader.loading import LoaderProcesses
        processes = LoaderProcesses(lambda step, m: m, 2)
        processes.send((0, 0))
        next(processes.receive(wait_s=60))
        if os.fork() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        signal.pause()
    """
    root = Path(__file__).resolve().parents[3]
    for _ in range(3):
        done = warm.run(
            [sys.executable, "-c", textwrap.dedent(code)], cwd=root, timeout=180, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


class _Gate:
    """Loading waits at it until the test opens it; who has come to it says so."""

    def __init__(self) -> None:
        self._there, self._open = os.pipe(), os.pipe()

    def wait(self) -> None:
        os.write(self._there[1], b"x")
        os.read(self._open[0], 1)

    def reached(self) -> None:
        os.read(self._there[0], 1)

    def open(self) -> None:
        os.write(self._open[1], b"x")


def test_a_slow_request_delays_no_other() -> None:
    gate = _Gate()
    with _processes(lambda step, m: gate.wait() if m == 0 else m, count=2) as processes:
        for micro_batch in range(6):
            processes.send((0, micro_batch))
        assert [_next(processes)[1] for _ in range(5)] == [1, 2, 3, 4, 5]
        gate.open()
        assert _next(processes) == ((0, 0), None)


def test_what_somebody_waits_for_comes_before_what_was_asked_for_ahead() -> None:
    gate = _Gate()
    with _processes(lambda step, m: gate.wait() if m == 0 else m) as processes:
        for micro_batch in range(3):
            processes.send((0, micro_batch))
        gate.reached()
        processes.send((7, 7), urgent=True)
        gate.open()
        assert [_next(processes)[0] for _ in range(4)] == [(0, 0), (7, 7), (0, 1), (0, 2)]


def test_a_process_that_does_not_come_to_an_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CLOSE_TIMEOUT_S", 0.0)
    gate = _Gate()
    with _processes(lambda step, m: gate.wait()) as processes:
        processes.send((0, 0))
        gate.reached()
        (pid,) = _pids(processes)
    assert not Path(f"/proc/{pid}").exists()


def _not_found_by_name(step: int, micro_batch: int) -> None:
    class OwnError(Exception):
        pass

    raise OwnError("mine alone")


def _with_history(step: int, micro_batch: int) -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda step, m: lambda: None, "^batch: Can't pickle .*lambda"),
        (_not_found_by_name, "OwnError: mine alone"),
        (_with_history, r"^batch: .*detach\(\)"),
    ],
)
def test_what_can_not_travel_is_an_error_and_no_dead_process(load: Callable[[int, int], Any], words: str) -> None:
    with _processes(load) as processes:
        for _ in range(2):
            processes.send((0, 0))
            failed = _next(processes)[1]
            assert isinstance(failed, LoadFailed)
            with pytest.raises(Exception, match=words):
                failed.raise_again()


def test_want_of_descriptors_is_an_error_and_no_wait() -> None:
    with _processes(_pair) as processes:
        processes.send((0, 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the standard streams: those below are not free
        try:
            request, packed = _came(processes)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert request == (0, 0) and isinstance(packed, OSError) and "RLIMIT_NOFILE" in str(packed)
        processes.send((0, 0))
        assert _next(processes)[0] == (0, 0)
