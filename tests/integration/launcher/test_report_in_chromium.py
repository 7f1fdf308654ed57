"""The report page in a real headless Chromium: nothing is loaded, the console stays empty, texts can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.report.history import history_of
from elastrain.launcher.watch.report.page import page
from elastrain.launcher.watch.report.run_logs import read_logs
from tests.support import chromium
from tests.support.run_logs import WrittenRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.CHROMIUM is None, reason="chromium is not installed"),
]
WIDTHS = (400, 800, 1280)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    run = WrittenRun(folder / "run", 4).end()
    run.journal("m0", "warning", reason="m1 had another gradient than its auditor", step=3)
    out = folder / "page.html"
    out.write_text(page(history_of(read_logs(RunDir(path=run.write(cut=True))), "none yet")))
    return out


def test_nothing_is_loaded_and_the_console_stays_empty(written: Path, tmp_path: Path) -> None:
    assert chromium.requests(written, tmp_path) == set()
    for theme in chromium.THEMES:
        picture = tmp_path / f"{theme}.png"
        assert chromium.screenshot(written, picture, width=800, height=1200, theme=theme, folder=tmp_path) == []


def test_an_image_from_elsewhere_would_be_seen(written: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(written.read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"></body>'))
    free = tmp_path / "free.html"  # without its policy the browser asks
    free.write_text(spoilt.read_text().replace("http-equiv", "name"))
    assert chromium.requests(free, tmp_path) == {"http://127.0.0.1:9/x.png"}
    assert chromium.screenshot(spoilt, tmp_path / "x.png", width=800, height=900, theme="light", folder=tmp_path)


@pytest.mark.parametrize("theme", chromium.THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_text_has_contrast_and_the_page_fits_its_window(
    written: Path, tmp_path: Path, theme: str, width: int
) -> None:
    found = chromium.texts(written, tmp_path, theme=theme, width=width)
    least = found["least"]
    assert isinstance(least, list) and least[0] >= 4.5, least
    assert isinstance(found["texts"], int) and found["texts"] > 50
    assert found["wide"] is False
