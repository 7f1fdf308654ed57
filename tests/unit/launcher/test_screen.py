"""The screen of a job: what cannot be shown holds up and ends no process, and is in the run folder's log."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path

import pytest

from elastrain.launcher.shared.screen import ScreenPipe

JOB = """
import os, subprocess, sys, time
from pathlib import Path
from elastrain.base.processes import open_missing
from elastrain.launcher.cli import main
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.screen import keep_in, shared
from elastrain.launcher.cli import command_line

def child(code):
    return subprocess.run([sys.executable, "-u", "-c", code], check=True)

def app(prog_name):
    with shared():
        keep_in(Path("events.jsonl"))
        {body}
        open("done", "w").close()

command_line.app = app
main.main()
"""
LINES = 'child("for i in range(2000): print(i, 80 * chr(46))")'


def start(body: str, folder: Path, stdout: int, stderr: int | None = None, shell: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", JOB.format(body=body)]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    stderr = stdout if stderr is None else stderr
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)


def kept(folder: Path) -> str:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {each["event"] for each in events} <= {"not_shown"}
    return "".join(each["text"] for each in events)


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(60)
    finally:
        process.kill()


def test_what_the_job_and_its_processes_write_is_shown_in_order(tmp_path: Path) -> None:
    body = "say('one'); child('import sys; print(2); print(3, file=sys.stderr)'); print('four', end='')"
    with start(body, tmp_path, subprocess.PIPE, subprocess.STDOUT) as process:
        out = process.communicate(timeout=180)[0]
    assert (process.returncode, out) == (0, b"elastrain: one\n2\n3\nfour")
    assert kept(tmp_path) == ""


@pytest.mark.slow
def test_streams_that_lead_to_two_places_stay_apart(tmp_path: Path) -> None:
    body = "say('one'); child('import sys; print(2); print(3, file=sys.stderr)')"
    with start(body, tmp_path, subprocess.PIPE, subprocess.PIPE) as process:
        assert process.communicate(timeout=180) == (b"2\n", b"elastrain: one\n3\n")


def broken() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def hung_up() -> int:
    ours, terminal = pty.openpty()
    os.close(ours)
    return terminal


@pytest.mark.slow
@pytest.mark.parametrize(
    "screen", [broken, hung_up, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["reader", "terminal", "disk"]
)
def test_a_screen_that_is_gone_ends_nothing(screen: Callable[[], int], tmp_path: Path) -> None:
    writer = screen()
    process = start(f"say('before'); {LINES}; say('the end')", tmp_path, writer)
    os.close(writer)
    assert ended(process) == 0 and (tmp_path / "done").exists()
    text = kept(tmp_path)
    assert text.startswith("elastrain: before\n0 ...") and text.endswith("1999 " + 80 * "." + "\nelastrain: the end\n")
    assert len(text.splitlines()) == 2002


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_start_end_nothing(shell: str, tmp_path: Path) -> None:
    body = f"assert os.open('/', 0) > 2; say('before'); {LINES}; say('the end')"
    assert ended(start(body, tmp_path, subprocess.DEVNULL, shell=shell)) == 0
    text = kept(tmp_path)
    assert text.startswith("elastrain: before\n") and text.endswith("elastrain: the end\n")
    assert ("1999 ..." in text) == (">&- 2>&-" in shell)


@pytest.mark.slow
def test_a_reader_that_stands_still_holds_nothing_up(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = start(f"{30 * (LINES + ';')} say('the end')", tmp_path, writer)
    os.close(writer)
    assert ended(process) == 0 and (tmp_path / "done").exists()
    with os.fdopen(reader, "rb") as rest:
        shown = rest.read()
    assert len(shown) > 30_000
    assert "\nelastrain: the end\n" in kept(tmp_path)
    assert (shown.decode() + kept(tmp_path)).count("1999 ...") >= 30


@pytest.mark.slow
def test_a_reader_that_reads_again_is_told_what_it_has_missed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    body = f"{20 * (LINES + ';')} open('go', 'w').close(); time.sleep(1); say('the end')"
    process = start(body, tmp_path, writer)
    os.close(writer)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "go").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    with os.fdopen(reader, "rb") as rest:
        shown = rest.read().decode()
    assert ended(process) == 0
    assert "bytes could not be shown: see events.jsonl in the run folder\n" in shown and shown.endswith(
        "elastrain: the end\n"
    )


@pytest.mark.slow
def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process = start(f"{5 * (LINES + ';')} say('the end')", tmp_path, writer)
    os.close(writer)
    shown = b""
    while chunk := os.read(reader, 1 << 15):
        shown += chunk
        time.sleep(0.05)
    os.close(reader)
    assert ended(process) == 0
    assert len(shown.splitlines()) == 10_001 and shown.endswith(b"elastrain: the end\n")


@pytest.mark.slow
def test_what_outlives_the_job_does_not_hold_up_its_end(tmp_path: Path) -> None:
    body = "left = subprocess.Popen(['sleep', '30']); say('the end'); open('pid', 'w').write(str(left.pid))"
    with start(body, tmp_path, subprocess.PIPE, subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"elastrain: the end\n"
            assert process.wait(20) == 0
        finally:
            os.kill(int((tmp_path / "pid").read_text()), 9)


@pytest.mark.slow
def test_the_processes_of_a_job_on_a_terminal_write_to_one_of_its_size(tmp_path: Path) -> None:
    ours, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 123, 0, 0))
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                seen.append(os.read(ours, 4096))
            except OSError:
                return

    thread = threading.Thread(target=read)
    thread.start()
    body = "time.sleep(.1); child('import os; print(os.isatty(1), os.isatty(2), *os.get_terminal_size())')"
    process = start(body, tmp_path, terminal)
    os.close(terminal)
    assert ended(process) == 0
    thread.join(20)
    os.close(ours)
    assert b"".join(seen) == b"True True 123 33\r\n"


def test_an_exit_code_is_that_of_the_job(tmp_path: Path) -> None:
    writer = broken()
    process = start("print('x', end=''); sys.exit(7)", tmp_path, writer)
    os.close(writer)
    assert ended(process) == 7


@pytest.mark.slow
def test_a_log_whose_disk_is_full_ends_no_worker(tmp_path: Path) -> None:
    body = """
        import resource
        from elastrain.launcher.agent.worker_start import Logs, _MemberLogs
        files = _MemberLogs(Logs(folder=Path("logs"), redirects={0: 3}), "m0", 0)
        files.variables()
        out = files.open(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        code = "for i in range(2000): print(i, 80 * chr(46))"
        subprocess.run([sys.executable, "-u", "-c", code], stdout=out, check=True)
        for each in files.carried:
            os.close(each.into)
            each.close()
"""
    assert ended(start(body, tmp_path, subprocess.DEVNULL)) == 0 and (tmp_path / "done").exists()
    written = (tmp_path / "logs/m0/stdout.log").read_bytes()
    assert written.startswith(b"0 ....") and len(written) == 10_000


def test_lines_are_shown_whole_with_a_prefix_and_the_file_gets_the_bytes(tmp_path: Path) -> None:
    shown, into = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        pipe = ScreenPipe(os.dup(log.fileno()), shown=(into, "[m3] "))
        for chunk in (b"one\ntw", b"o\r\n10 %\r20 %\rend", b" without a line's end"):
            os.write(pipe.into, chunk)
            time.sleep(0.05)  # so that it is read apart
        os.close(pipe.into)
        pipe.close()
    os.close(into)
    with os.fdopen(shown, "rb") as lines:
        assert lines.read() == b"[m3] one\n[m3] two\n[m3] 10 %\n[m3] 20 %\n[m3] end without a line's end\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\r\n10 %\r20 %\rend without a line's end"
