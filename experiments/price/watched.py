"""The price of watching: a job beside which `elastrain top` runs in a terminal and its metrics are scraped each second.

`python -m experiments.price.run --watched [--quick]`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from experiments.baselines.workload import Measurement, Workload
from experiments.harness import ROOT

SCRAPE_EVERY_S = 1.0
ELASTRAIN = str(Path(sys.executable).with_name("elastrain"))


@contextmanager
def watching(run: Path, port: int) -> Iterator[list[int]]:
    """Watch a run from its start on. Yields a list that gets the size of each answer of the metrics in bytes."""
    over, sizes = threading.Event(), list[int]()
    threads = [
        threading.Thread(target=_scrape, args=(port, over, sizes)),
        threading.Thread(target=_show, args=(run, over)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield sizes
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _scrape(port: int, over: threading.Event, sizes: list[int]) -> None:
    while not over.wait(SCRAPE_EVERY_S):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                sizes.append(len(answer.read()))
        except OSError:  # the job is being started, or has just ended
            continue


def _show(run: Path, over: threading.Event) -> None:
    """Run `elastrain top` in a terminal of 80×24 until the job is over."""
    while not (run / "events.jsonl").exists():
        if over.wait(0.1):
            return
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    top = subprocess.Popen(
        [ELASTRAIN, "top", str(run)], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    os.set_blocking(ours, False)
    while not over.wait(0.05):
        try:
            while os.read(ours, 1 << 16):
                pass
        except BlockingIOError:
            continue
        except OSError:  # `top` has ended
            break
    top.kill()
    top.wait()
    os.close(ours)


def watched_job(work: Workload, members: int) -> list[Measurement]:
    """One job that is watched all the time. Raises RuntimeError if it fails or was never scraped."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="elastrain-price-") as name:
        out, run = Path(name) / "measured", Path(name) / "run"
        out.mkdir()
        command = [ELASTRAIN, "run", "--standalone", "--nproc-per-node", str(members), "--run-dir", str(run)]
        command += ["--metrics-port", str(port), str(ROOT / "experiments" / "price" / "worker.py"), "--out", str(out)]
        command += ["--work", json.dumps(asdict(work)), "--backups", "0", "--run-length", "2", "--kind", "fp32"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with watching(run, port) as sizes:
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
        found = [Measurement(**json.loads(file.read_text())) for file in out.glob("*.json")]
    if done.returncode or len(found) != members or not sizes:
        tail = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{len(found)} measurements, code {done.returncode}, {len(sizes)} scrapes:\n{tail}")
    return found


def started_s(*words: str) -> float:
    """Return the processor seconds of one short command."""
    before = os.times()
    subprocess.run([ELASTRAIN, *words], capture_output=True, check=False, timeout=60)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def storm_figures() -> Mapping[str, float]:
    """Return what the report of 200 incidents takes: seconds from the command to its end, and bytes."""
    from tests.support.run_logs import WrittenRun

    with tempfile.TemporaryDirectory(prefix="elastrain-report-") as name:
        run = WrittenRun(Path(name) / "run", 100, steps_each=40).end().write()
        out = Path(name) / "page.html"
        begin_s = time.monotonic()
        subprocess.run([ELASTRAIN, "report", str(run), "--out", str(out)], check=True, capture_output=True, timeout=120)
        return {"report_s": time.monotonic() - begin_s, "bytes": float(out.stat().st_size), **_seen(out, Path(name))}


def _seen(page: Path, folder: Path) -> Mapping[str, float]:
    """Return the errors on the console and the least contrast in Chromium, or nothing where that is missing."""
    from tests.support import chromium

    if chromium.CHROMIUM is None:
        return {}
    errors, contrasts = 0, list[float]()
    for theme in chromium.THEMES:
        picture = folder / f"{theme}.png"
        errors += len(chromium.screenshot(page, picture, width=1280, height=2000, theme=theme, folder=folder))
        least = chromium.texts(page, folder, theme=theme, width=1280)["least"]
        assert isinstance(least, list)
        contrasts.append(float(least[0]))
    return {"console_errors": float(errors), "contrast": min(contrasts)}


def starts(times: int = 5) -> Mapping[str, float]:
    """Return the median processor seconds of `elastrain --help` and of `elastrain status`."""
    from tests.support.run_logs import WrittenRun
    from tests.support.watched import a_state

    with tempfile.TemporaryDirectory(prefix="elastrain-status-") as name:
        run = WrittenRun(Path(name), 0).end().write()
        (run / "run.json").write_text(json.dumps(a_state(exit_code=0, state="finished")))
        return {
            "help_cpu_s": _middle([started_s("--help") for _ in range(times)]),
            "status_cpu_s": _middle([started_s("status", str(run)) for _ in range(times)]),
        }


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
