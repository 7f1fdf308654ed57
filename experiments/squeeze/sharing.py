"""Is one SSD shared fairly by the ranks of a node? `python -m experiments.squeeze.sharing --dir DIR`.

Four processes write 8 MiB pieces as fast as they can for a few seconds, the first one from eight threads, the others
from two: with turns and without. Reports what the rank that got least got, in units of the one that got most, and the
longest wait for one piece.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from elastrain.offload.drives.port import IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.sharing import SharedDrive, SharedEngine
from experiments.harness import add_record_flag, record
from experiments.offload.device import spill_directory

PIECE_BYTES = 8 << 20
PIECES_PER_THREAD = 4
THREADS = (8, 2, 2, 2)


def write_for(directory: str, turns: str, threads: int, seconds: float) -> None:
    """One rank: prints how many pieces it wrote and its longest wait for one."""
    engine: IoEngine = PosixEngine(directory)
    if turns:
        engine = SharedEngine(engine, SharedDrive(turns))
    engine.reserve(threads * PIECES_PER_THREAD * PIECE_BYTES)
    waits_s: list[float] = []
    sys.stdin.readline()
    end_s = time.monotonic() + seconds

    def work(thread: int) -> None:
        memory = memoryview(mmap.mmap(-1, PIECE_BYTES))
        place = 0
        while (began_s := time.monotonic()) < end_s:
            engine.write((thread * PIECES_PER_THREAD + place) * PIECE_BYTES, [memory])
            waits_s.append(time.monotonic() - began_s)
            place = (place + 1) % PIECES_PER_THREAD

    working = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for each in working:
        each.start()
    for each in working:
        each.join()
    print(json.dumps({"pieces": len(waits_s), "longest_s": max(waits_s)}))


def measured(directory: Path, turns: Path | None, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "experiments.squeeze.sharing", "--dir", str(directory), "--seconds", str(seconds)]
    ranks = [
        subprocess.Popen(
            [*command, "--threads", str(threads), "--turns", str(turns or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in THREADS
    ]
    time.sleep(2)  # all are up; then all begin together
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    told = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    pieces = [each["pieces"] for each in told]
    return {
        "least_to_most": min(pieces) / max(pieces),
        "longest_wait_s": max(each["longest_s"] for each in told),
        "gb_per_s": sum(pieces) * PIECE_BYTES / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default="/var/tmp", help="on the SSD")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--threads", type=int, help="be one of the ranks")
    parser.add_argument("--turns", default="")
    add_record_flag(parser)
    args = parser.parse_args()
    if args.threads is not None:
        write_for(args.dir, args.turns, args.threads, args.seconds)
        return
    with tempfile.TemporaryDirectory(dir=spill_directory(parser, args.dir)) as name:
        folder = Path(name)
        figures: dict[str, float] = {}
        for kind, turns in (("turns", folder / "turns"), ("free", None)):
            found = measured(folder, turns, args.seconds)
            figures |= {f"{key}_{kind}": value for key, value in found.items()}
    if args.record:
        record(
            "squeeze", figures, quick=True, settings={"what": "sharing", "threads": THREADS, "seconds": args.seconds}
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
