"""Event files, read back as TensorBoard reads them: each step once, whoever wrote it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.job.log_book import Line
from elastrain.runtime.loggers.event_files import TensorBoard

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)

pytestmark = pytest.mark.slow


def written(folder: Path, behind: int, *steps: int, run: str = "a run", scale: float = 1.0) -> TensorBoard:
    logger = TensorBoard(folder)
    logger.begin(run)
    logger.cut(behind)
    logger.write([Line(step, {"loss": step * scale, "train/right": 2 * step, "none": None}) for step in steps])
    return logger


def read(folder: Path, tag: str = "loss") -> list[tuple[int, float]]:
    found = accumulators.EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_numbers_are_scalars_by_step(tmp_path: Path) -> None:
    written(tmp_path, -1, 0, 1, 2)
    assert read(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert read(tmp_path, "train/right") == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_what_a_new_writer_writes_again_is_there_once(tmp_path: Path) -> None:
    written(tmp_path, -1, 0, 1, 2, 3)
    other = TensorBoard(tmp_path)
    assert other.begin("a run") == 3
    other.cut(1)
    other.write([Line(step, {"loss": 10.0 * step}) for step in (2, 3, 4)])
    assert read(tmp_path) == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_a_clock_that_is_behind_does_not_change_the_order_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, -1, 0, 1)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    written(tmp_path, 0, 1, 2, scale=10.0)
    assert read(tmp_path) == [(0, 0.0), (1, 10.0), (2, 20.0)]


def test_a_torn_last_event_is_no_step(tmp_path: Path) -> None:
    written(tmp_path, -1, 0, 1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert TensorBoard(tmp_path).begin("a run") == 0
    written(tmp_path, 0, 1, 2)
    assert read(tmp_path) == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_run_of_another_job_in_the_same_folder_is_replaced_as_by_a_summary_writer(tmp_path: Path) -> None:
    written(tmp_path, -1, 0, 1, 2, run="old")
    assert TensorBoard(tmp_path).begin("new") == -1
    written(tmp_path, -1, 0, run="new")
    assert read(tmp_path) == [(0, 0.0)]


def test_words_are_texts_and_numbers_that_are_none_stay_what_they_are(tmp_path: Path) -> None:
    logger = written(tmp_path, -1)
    logger.write([Line(0, {"phase": "warm-up", "loss": math.nan, "count": 1 << 62})])
    found = accumulators.EventAccumulator(str(tmp_path)).Reload()
    (event,) = (
        found.Tensors("phase/text_summary")
        if "phase/text_summary" in found.Tags()["tensors"]
        else found.Tensors("phase")
    )
    assert event.tensor_proto.string_val == [b"warm-up"]
    assert math.isnan(read(tmp_path)[0][1]) and read(tmp_path, "count") == [(0, float(1 << 62))]


def test_what_is_no_folder_is_refused_and_so_is_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"elastrain\.TensorBoard\(log_dir\) takes the name of a folder; got None"):
        TensorBoard(None)  # type: ignore[arg-type]
    monkeypatch.setattr("elastrain.runtime.loggers.libraries.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package tensorboard: pip install tensorboard"):
        TensorBoard("runs")
