"""A file of JSON lines: what a writer finds in it, removes and appends, and whose lines it leaves alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastrain.errors import ConfigError
from elastrain.job.log_book import Line
from elastrain.runtime.loggers.jsonl import Jsonl

RUN = "a run"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "log.jsonl"


def lines(*steps: int) -> list[Line]:
    return [Line(step, {"loss": step / 2}) for step in steps]


def written(path: Path, *steps: int, run: str = RUN) -> Jsonl:
    logger = Jsonl(path)
    logger.begin(run)
    logger.cut(-1)
    logger.write(lines(*steps))
    return logger


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read(path)]


def test_each_line_says_step_run_and_values(path: Path) -> None:
    written(path, 0, 1)
    assert read(path) == [{"step": 0, "run": RUN, "loss": 0.0}, {"step": 1, "run": RUN, "loss": 0.5}]


def test_values_that_json_lacks_are_null_and_all_others_keep_their_bits(path: Path) -> None:
    logger = written(path)
    values = {"a": math.nan, "b": math.inf, "c": 0.1, "d": 1 << 60, "e": "ü\n", "f": True, "g": None}
    logger.write([Line(0, values)])
    assert read(path) == [{"step": 0, "run": RUN, **values, "a": None, "b": None}]


def test_a_new_writer_finds_the_last_step_and_goes_on_behind_what_it_keeps(path: Path) -> None:
    written(path, 0, 1, 1, 2, 3)
    other = Jsonl(path)
    assert other.begin(RUN) == 3
    other.cut(1)
    assert steps(path) == [0, 1, 1]
    other.write(lines(2, 3, 4))
    assert steps(path) == [0, 1, 1, 2, 3, 4]


def test_a_cut_behind_the_last_step_removes_nothing_and_one_before_the_first_removes_all(path: Path) -> None:
    logger = written(path, 3, 4)
    logger.cut(9)
    assert steps(path) == [3, 4]
    logger.cut(2)
    assert steps(path) == []
    assert logger.begin(RUN) == -1


@pytest.mark.parametrize("torn", [b"{", b'{"step":2,"run":"a r', b'{"step":2,"run":"a run","loss":1.0}'])
def test_a_torn_last_line_is_removed(path: Path, torn: bytes) -> None:
    written(path, 0, 1)
    with path.open("ab") as file:
        file.write(torn)
    assert Jsonl(path).begin(RUN) == 1
    assert steps(path) == [0, 1]


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step":0,"run":"a r'])
def test_a_file_that_has_no_whole_line_yet_is_empty(path: Path, torn: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(torn)
    assert Jsonl(path).begin(RUN) == -1
    assert path.read_bytes() == b"" and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("content", ["no line at all", "a text\nof others\n", '{"step": 3, "loss": 1.0}\n', "[]\n"])
def test_a_file_of_others_is_moved_aside_and_keeps_every_byte(
    path: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path.parent.mkdir()
    path.write_text(content)
    written(path, 0)
    assert steps(path) == [0]
    assert path.with_name("log.1.jsonl").read_text() == content
    assert "log.jsonl had lines of another run: they are in" in capfd.readouterr().err


def test_each_run_has_a_file_of_its_own(path: Path) -> None:
    for run in ("first", "second", "third"):
        written(path, 0, run=run)
    told = {file.name: read(file)[0]["run"] for file in path.parent.iterdir()}
    assert told == {"log.1.jsonl": "first", "log.2.jsonl": "second", "log.jsonl": "third"}


def test_two_processes_that_both_write_notice_it(path: Path) -> None:
    one = written(path, 0)
    other = Jsonl(path)
    assert other.begin(RUN) == 0
    other.cut(0)
    other.write(lines(1))
    with pytest.raises(OSError, match="another process has written"):
        one.write(lines(1))
    assert steps(path) == [0, 1]


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_no_half_line_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, real = written(path, 0), os.write
    room: Iterator[int] = iter([5])

    def write(fd: int, data: bytes) -> int:
        for count in room:
            return real(fd, data[:count])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        logger.write(lines(1))
    monkeypatch.undo()
    assert logger.begin(RUN) == 0
    logger.cut(0)
    logger.write(lines(1))
    assert steps(path) == [0, 1]


def test_a_long_file_is_read_from_its_end(path: Path) -> None:
    written(path, *range(5000))
    logger = Jsonl(path)
    assert logger.begin(RUN) == 4999
    logger.cut(4997)
    assert steps(path)[-2:] == [4996, 4997]


def test_what_is_no_name_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes the name of a file; got 7"):
        Jsonl(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a folder"):
        Jsonl(tmp_path)
