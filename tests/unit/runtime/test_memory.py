"""What a process held at most is told apart from what it read of others' memory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

MIB = 1 << 20

MEASURED = """
import json, mmap, sys
from elastrain.runtime.memory import PeakMeter
MIB = 1 << 20
others = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED)  # stands for a peer's memory
meter = PeakMeter(lambda: 0)
before = meter.take()
assert sum(others[::4096]) == 0
if sys.argv[1] == "look":
    meter.look()
own = bytearray(64 * MIB)
own[::4096] = bytes(len(own[::4096]))
del own
print(json.dumps(dict(before=before, peak=meter.take(), after=meter.take())))
"""


def measured(how: str) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURED, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_what_was_read_of_others_before_a_look_does_not_count_as_what_was_held_after_it() -> None:
    found = measured("look")
    assert 60 * MIB < found["peak"] - found["before"] < 80 * MIB


def test_without_a_look_nothing_that_was_held_is_missed() -> None:
    found = measured("no look")
    assert found["peak"] - found["before"] > 120 * MIB


def test_a_peak_that_was_taken_is_not_told_again() -> None:
    found = measured("look")
    assert found["after"] - found["before"] < 16 * MIB
