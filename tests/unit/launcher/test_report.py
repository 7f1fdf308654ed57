"""The report of a run: what is read from its logs, incidents with their phases, and one page that stands alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastrain.launcher.cli import command_line
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.report.drawing import Axis, moments_of, steps_of
from elastrain.launcher.watch.report.history import History, history_of, thinned
from elastrain.launcher.watch.report.page import page
from elastrain.launcher.watch.report.page_style import DARK, LIGHT
from elastrain.launcher.watch.report.run_logs import read_logs
from tests.support.run_logs import WrittenRun


def read(folder: Path, over: str = "none yet") -> History:
    return history_of(read_logs(RunDir(path=folder)), over)


def test_an_incident_has_its_phases_in_milliseconds(tmp_path: Path) -> None:
    history = read(WrittenRun(tmp_path, 1).end().write())
    lost, joined = history.incidents
    assert (lost.generation, lost.lost, lost.joined, lost.reason) == (2, ("m1",), (), "m1 lost")
    assert lost.took_ms == pytest.approx((5.0, 3.0, 2.0, 10.0, 0.0))
    assert (joined.lost, joined.joined) == ((), ("m2",))
    assert joined.took_ms == pytest.approx((0.0, 0.0, 2.0, 10.0, 50.0))
    assert joined.total_ms == pytest.approx(62.0)


def test_a_window_that_is_still_open_leaves_the_last_phase_without_an_end(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 1)
    del run.lines["events"][-2:]  # the window's end, and the checkpoint after it
    assert read(run.write()).incidents[-1].ends_s[-1] is None


def test_lives_curves_and_marks(tmp_path: Path) -> None:
    history = read(WrittenRun(tmp_path, 2).end().write())
    assert [(life.member, life.is_lost) for life in history.lives] == [
        *(("m0", False), ("m1", True), ("m2", True), ("m3", False))
    ]
    assert history.lives[0].entered_s == pytest.approx(2.0)
    assert (history.steps, history.end, history.job) == (64, "finished after step 63", "storm")
    assert [mark.text for mark in history.faults] == [
        *("kill of m1 in step 20, backward", "kill of m2 in step 42, backward")
    ]
    assert history.series.limit_bytes == 2 * 10**8 and set(history.series.memory) == {"m0", "m1", "m2", "m3"}
    assert len(history.series.audits) == 10 and len(history.checkpoints) == 5
    assert history.series.step_s[0][1] == pytest.approx(0.1)


def test_a_run_under_way_and_one_whose_logs_end_in_half_a_line(tmp_path: Path) -> None:
    whole, cut = read(WrittenRun(tmp_path / "a", 1).write()), read(WrittenRun(tmp_path / "b", 1).write(cut=True))
    assert whole.end == cut.end == "none yet"
    assert (whole.unreadable, cut.unreadable) == (0, 4)
    assert cut.steps == whole.steps and len(cut.incidents) == len(whole.incidents)
    assert "4 lines of the logs could not be read" in page(cut)


@given(st.binary(max_size=200), st.integers(0, 3000))
def test_no_damage_keeps_the_page_from_being_made(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    events = WrittenRun(folder, 1, steps_each=2).end().write() / "events.jsonl"
    text = events.read_bytes()
    events.write_bytes(text[:at] + junk + text[at:])
    assert page(read(folder)).endswith("</html>\n")


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    text = page(read(tmp_path))
    assert "the members never changed" in text and "nothing of this was written" in text


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 0)
    run.members = ["m0", "<script>alert(1)"]
    run.view('<img src="x">')
    text = page(read(run.write()))
    assert "<script" not in text and "<img" not in text and "&lt;script&gt;" in text


def test_the_page_names_nothing_that_a_browser_would_load(tmp_path: Path) -> None:
    text = page(read(WrittenRun(tmp_path, 3).end().write()))
    assert not re.search(r"<script|<link|<img|<iframe|@import|src=|href=|url\((?!#)|https?:", text)


def test_200_incidents_make_at_most_3_megabytes(tmp_path: Path) -> None:
    history = read(WrittenRun(tmp_path, 100).end().write())
    assert len(history.incidents) == 200
    assert len(page(history).encode()) <= 3 * 10**6


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=500), st.integers(3, 60))
def test_a_thinned_curve_keeps_its_highest_and_lowest_point(points: list[tuple[float, float]], most: int) -> None:
    kept = thinned(sorted(points), most)
    assert len(kept) <= most + 3 and set(kept) <= set(points) and kept == sorted(kept)
    values = [value for _, value in points]
    assert {min(values), max(values)} <= {value for _, value in kept}


@given(st.floats(1e-3, 1e8))
def test_labels_are_few_and_inside(length_s: float) -> None:
    for found in (moments_of(length_s), steps_of(0.0, length_s)):
        assert 1 <= len(found) <= 13 and found[0] >= 0 and found[-1] <= length_s * 1.000001
    assert Axis(length_s=length_s).x(length_s) == 990


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("text", ["text", "quiet", "bad"])
@pytest.mark.parametrize("ground", ["paper", "panel"])
def test_texts_have_contrast(palette: dict[str, str], text: str, ground: str) -> None:
    assert contrast(palette[text], palette[ground]) >= 4.5


def test_the_command_writes_the_page_and_refuses_with_a_sentence(tmp_path: Path) -> None:
    folder = WrittenRun(tmp_path / "run", 1).end().write()
    done = CliRunner().invoke(command_line.app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and "m1 lost" in (tmp_path / "page.html").read_text()
    for words, sentence in (
        ([str(folder)], "say where to write"),
        ([str(folder), "--out", str(tmp_path / "no/page.html")], "cannot be written"),
        ([str(tmp_path), "--out", str(tmp_path / "x.html")], "there is no run"),
    ):
        done = CliRunner().invoke(command_line.app, ["report", *words])
        assert done.exit_code == 2 and sentence in done.stderr
