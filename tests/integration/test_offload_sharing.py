"""Processes that share a drive: everybody gets a turn in the order of asking, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from elastrain.offload.engines.memory import MemoryEngine
from elastrain.offload.sharing import SharedEngine, Turns, shared

TAKES = """
import sys, time
from elastrain.offload.sharing import Turns
turns = Turns(sys.argv[1], width=int(sys.argv[2]))
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
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def taken(processes: list[subprocess.Popen[str]]) -> list[list[tuple[int, float, float]]]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0].splitlines() for process in processes]
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
    found = taken([start(tmp_path / "turns", width=1, count=60) for _ in range(3)])
    together = range(max(lines[0][0] for lines in found), min(lines[-1][0] for lines in found))
    owner = {number: who for who, lines in enumerate(found) for number, _, _ in lines}
    counts = [sum(1 for number in together if owner[number] == who) for who in range(3)]
    assert max(counts) - min(counts) <= len(together) // 10 + 3, counts


def test_a_killed_process_keeps_nobody_waiting(tmp_path: Path) -> None:
    file = tmp_path / "turns"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(file)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=30)
    try:
        with Turns(file, width=1).turn() as number:
            assert number == 1
    finally:
        os.kill(child, signal.SIGKILL)


HOLDS = """
import os, signal, sys
from elastrain.offload.sharing import Turns
with Turns(sys.argv[1], width=1).turn():
    child = os.fork()  # as a data loader is; it must not inherit the turn
    if child:
        print(child, flush=True)
    signal.pause()
"""


def test_an_engine_that_takes_turns_moves_the_same_bytes(tmp_path: Path) -> None:
    engine = SharedEngine(MemoryEngine(), Turns(tmp_path / "turns"))
    engine.reserve(8192)
    engine.write(4096, [memoryview(bytearray(b"x" * 4096))])
    back = bytearray(4096)
    engine.read(4096, [memoryview(back)])
    assert bytes(back) == b"x" * 4096
    engine.close()


def test_alone_nobody_takes_turns(tmp_path: Path) -> None:
    before = os.environ.pop("ELASTRAIN_RUN_DIR", None)
    try:
        engine = MemoryEngine()
        assert shared(engine, tmp_path) is engine
        os.environ["ELASTRAIN_RUN_DIR"] = str(tmp_path)
        assert isinstance(shared(engine, tmp_path), SharedEngine)
    finally:
        os.environ.pop("ELASTRAIN_RUN_DIR", None)
        if before is not None:
            os.environ["ELASTRAIN_RUN_DIR"] = before
