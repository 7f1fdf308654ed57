"""What a process held at most is told apart from what it read of others' memory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
MIB = 1 << 20

MEASURED = """
import json, mmap, sys
from elastrain.runtime.memory.process_memory import PeakMeter
MIB = 1 << 20
others = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED)  # stands for a peer's memory
def read():
    assert sum(others[::4096]) == 0
def hold():
    own = bytearray(64 * MIB)
    own[::4096] = bytes(len(own[::4096]))
meter = PeakMeter(lambda: 0)
before = meter.take()
for what in sys.argv[1:]:
    dict(read=read, hold=hold, look=meter.look)[what]()
peak, after = meter.take(), meter.take()
print(json.dumps([each - before.least_bytes for each in (peak.least_bytes, peak.most_bytes, after.most_bytes)]))
"""


def measured(*how: str) -> list[int]:
    """At least, at most, and at most since then."""
    command = [sys.executable, "-c", MEASURED, *how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("how", [("read", "hold"), ("hold", "look", "read", "hold")])
def test_what_is_read_of_others_for_the_first_time_does_not_count_as_held_for_certain(how: tuple[str, ...]) -> None:
    least_bytes, most_bytes, _ = measured(*how)
    assert 60 * MIB < least_bytes < 80 * MIB
    assert 120 * MIB < most_bytes < 144 * MIB


@pytest.mark.parametrize("how", [("read", "look", "hold"), ("hold", "look", "read")])
def test_a_look_between_the_two_tells_them_apart(how: tuple[str, ...]) -> None:
    least_bytes, most_bytes, _ = measured(*how)
    assert 60 * MIB < least_bytes <= most_bytes < 80 * MIB


def test_without_a_look_nothing_that_was_held_is_missed_in_the_most() -> None:
    least_bytes, most_bytes, _ = measured("hold", "read")
    assert least_bytes < 16 * MIB
    assert most_bytes > 60 * MIB


def test_a_peak_that_was_taken_is_not_told_again() -> None:
    assert measured("read", "look", "hold")[-1] < 16 * MIB
