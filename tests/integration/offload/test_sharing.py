"""Processes that share a drive: everybody gets a turn, reads before writes, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from elastrain.offload.drives.sharing import Places, SharedDrive, SharedEngine, TicketLock, shared
from tests.support import warm
from tests.support.memory_engine import MemoryEngine
from tests.support.waiting import until

TAKES = """
import sys, time
from elastrain.offload.drives.sharing import TicketLock
turns = TicketLock(sys.argv[1], width=int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    with turns.turn() as number:
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.001:
            pass
        ended_s = time.monotonic()
    print(number, began_s, ended_s, flush=True)
"""


def start(file: Path, *, width: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TAKES, str(file), str(width), str(count)]
    process = warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def taken(processes: list[subprocess.Popen[str]]) -> list[list[tuple[int, float, float]]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=360)[0].splitlines() for process in processes]
    return [[(int(n), float(a), float(b)) for n, a, b in (line.split() for line in lines)] for lines in told]


def test_turns_are_taken_in_the_order_of_asking_and_at_most_so_many_at_a_time(tmp_path: Path) -> None:
    for width in (1, 2):
        count = 40
        found = taken([start(tmp_path / f"{width}", width=width, count=count) for _ in range(4)])
        turns = sorted(turn for lines in found for turn in lines)
        assert [number for number, _, _ in turns] == list(range(4 * count))
        for (_, _, ended_s), (_, began_s, _) in zip(turns, turns[width:], strict=False):
            assert began_s >= ended_s, "it began before the turn that it had to wait for was over"


def test_no_process_gets_two_turns_while_another_waits_for_one(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    turns, other = TicketLock(file, width=1), start(file, width=1, count=1)
    assert other.stdin is not None and other.stdout is not None
    with turns.turn() as first:
        other.stdin.write("\n")
        other.stdin.flush()
        until(partial(_has_drawn, file, first + 2))
    with turns.turn() as second:
        assert second == first + 2
    assert int(other.communicate(timeout=360)[0].split()[0]) == first + 1


def test_a_killed_process_keeps_nobody_waiting(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    holder = warm.Popen(
        [sys.executable, "-c", HOLDS, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=30)
    try:
        with TicketLock(file, width=1).turn() as number:
            assert number == 1
    finally:
        os.kill(child, signal.SIGKILL)


HOLDS = """
import os, signal, sys
from elastrain.offload.drives.sharing import TicketLock
with TicketLock(sys.argv[1], width=1).turn():
    child = os.fork()  # as a data loader is; it must not inherit the turn
    if child:
        print(child, flush=True)
    signal.pause()
"""


def test_an_engine_that_takes_turns_moves_the_same_bytes(tmp_path: Path) -> None:
    engine = SharedEngine(MemoryEngine(), SharedDrive(tmp_path / "turns"))
    engine.reserve(8192)
    engine.write(4096, [memoryview(bytearray(b"x" * 4096))])
    back = bytearray(4096)
    engine.read(4096, [memoryview(back)])
    assert bytes(back) == b"x" * 4096
    engine.close()


class GatedEngine:
    """An engine whose writes end when they are told to, and that remembers what began in which order."""

    def __init__(self) -> None:
        self.name = "gate"
        self.began: list[str] = []
        self._told: dict[int, threading.Event] = defaultdict(threading.Event)

    def reserve(self, size_bytes: int) -> None: ...

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        self.began.append(f"write {offset_bytes}")
        assert self._told[offset_bytes].wait(30)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        self.began.append("read")

    def capacity_bytes(self) -> int:
        return 0

    def close(self) -> None: ...

    def end_write(self, offset_bytes: int) -> None:
        self._told[offset_bytes].set()


def _has_drawn(file: Path, wanted: int) -> bool:
    """Whether so many turns have been drawn."""
    told = file.read_bytes()[:8] if file.exists() else b""
    return len(told) == 8 and struct.unpack("<q", told)[0] >= wanted


def test_a_rank_that_reads_goes_before_the_ranks_that_wait_to_write(tmp_path: Path) -> None:
    file, writes, gate = tmp_path / "turns", tmp_path / "turns-writes", GatedEngine()
    page = memoryview(bytearray(4096))
    ranks = []
    for number in range(6):  # each with open files of its own, as processes have: locks belong to them
        engine = SharedEngine(gate, SharedDrive(file))
        ranks.append(threading.Thread(target=engine.write, args=(number, [page])))
        ranks[-1].start()
        until(partial(_has_drawn, writes, number + 1))
        until(partial(_has_drawn, file, min(number + 1, 2)))
    reader = threading.Thread(target=SharedEngine(gate, SharedDrive(file)).read, args=(0, [page]))
    reader.start()
    until(partial(_has_drawn, file, 3))
    gate.end_write(0)
    reader.join(30)
    for number in range(6):
        gate.end_write(number)
        ranks[number].join(30)
    assert sorted(gate.began[:2]) == ["write 0", "write 1"]
    assert gate.began[2] == "read"
    assert sorted(gate.began[3:]) == ["write 2", "write 3", "write 4", "write 5"]


def test_threads_of_a_rank_take_places_in_the_order_of_asking() -> None:
    """Nobody overtakes: not even the one that gives a place back and asks again at once."""
    places, order = Places(1), []

    def ask(number: int) -> None:
        with places.place():
            order.append(number)

    asking = []
    with places.place():
        for number in range(4):
            asking.append(threading.Thread(target=ask, args=(number,)))
            asking[-1].start()
            until(partial(_waits, places, number + 1))
    with places.place():
        order.append(-1)
    for thread in asking:
        thread.join(30)
    assert order == [0, 1, 2, 3, -1]


def _waits(places: Places, wanted: int) -> bool:
    return len(places._waiting) == wanted


WRITES = """
import json, mmap, sys, threading, time
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.sharing import SharedDrive, SharedEngine

directory, turns, threads, pieces, SIZE = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), 4 << 20
engine = SharedEngine(PosixEngine(directory), SharedDrive(turns))
engine.reserve(threads * SIZE)
ended_s = []
def work(thread):
    memory = memoryview(mmap.mmap(-1, SIZE))
    while len(ended_s) < pieces:
        engine.write(thread * SIZE, [memory])
        ended_s.append(time.monotonic())
print("ready", flush=True)
sys.stdin.readline()
working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
for each in working: each.start()
for each in working: each.join()
print(json.dumps(ended_s))
"""
FAIR = 1.5
"""While all write, the rank that gets most gets at most so many times the bytes of the one that gets least."""


@pytest.mark.on_demand  # on a busy machine, who gets no processor asks for no turn
def test_ranks_that_write_at_once_get_the_same_share_of_the_drive_however_many_threads_they_have(
    tmp_path: Path,
) -> None:
    ranks = []
    for threads in (8, 2, 2):
        command = [sys.executable, "-c", WRITES, str(tmp_path), str(tmp_path / "turns"), str(threads), "120"]
        ranks.append(warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    ended_s = [json.loads(rank.communicate(timeout=360)[0]) for rank in ranks]
    first_s, last_s = max(each[0] for each in ended_s), min(each[-1] for each in ended_s)
    shares = [sum(1 for at_s in each if first_s <= at_s <= last_s) for each in ended_s]
    assert min(shares) > 40, "they hardly wrote at the same time"
    assert max(shares) <= FAIR * min(shares), shares


def test_alone_nobody_takes_turns(tmp_path: Path) -> None:
    engine = MemoryEngine()
    assert shared(engine, tmp_path, None) is engine
    assert isinstance(shared(engine, tmp_path, tmp_path), SharedEngine)
