"""What a process says on its own standard error: it comes out, or is lost; it ends nothing and holds nothing up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from elastrain.base.processes import say

SAYS = "from elastrain.base.processes import say; [say('one sentence') for _ in range({times})]"


def run(code: str, stderr: int, shell: str = "") -> int:
    command = [sys.executable, "-c", code]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    return subprocess.run(command, stderr=stderr, timeout=180, check=False).returncode


def test_a_sentence_is_one_line() -> None:
    ran = subprocess.run([sys.executable, "-c", SAYS.format(times=2)], stderr=subprocess.PIPE, check=True)
    assert ran.stderr == 2 * b"elastrain: one sentence\n"


def test_a_stream_of_the_scripts_own_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    say("one sentence")
    assert capsys.readouterr().err == "elastrain: one sentence\n"


def test_where_nobody_reads_any_more_the_exit_code_is_the_scripts() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run(SAYS.format(times=3), writer) == 0
    os.close(writer)
    with open("/dev/full", "w") as full:
        assert run(SAYS.format(times=3), full.fileno()) == 0
    assert run(SAYS.format(times=3), subprocess.DEVNULL, shell="2>&-") == 0


def test_a_reader_that_stands_still_holds_a_sentence_up_for_a_second() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    began_s = time.monotonic()
    assert run(SAYS.format(times=2), writer) == 0
    assert time.monotonic() - began_s > 1.5
    os.close(writer)
    os.close(reader)


def test_closed_streams_are_opened_so_that_nothing_else_gets_their_numbers() -> None:
    code = "import os; from elastrain.base.processes import open_missing; open_missing(); assert os.open('/', 0) > 2; "
    code += "import subprocess, sys; "
    code += "subprocess.run([sys.executable, '-c', 'import os; os.fstat(1), os.fstat(2)'], check=True)"
    assert run(code, subprocess.DEVNULL, shell="<&- >&- 2>&-") == 0
