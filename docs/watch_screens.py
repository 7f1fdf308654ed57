"""Screens of `elastrain top` and of the report, in three widths and two themes: `python -m docs.watch_screens`.

They show a job that never was. It writes `docs/screens/`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.report.history import history_of
from elastrain.launcher.watch.report.page import page
from elastrain.launcher.watch.report.run_logs import read_logs
from tests.support import chromium
from tests.support.run_logs import WrittenRun
from tests.support.watched import a_member, a_state

FOLDER = Path(__file__).with_name("screens")
PAGE_WIDTHS = (400, 800, 1280)
SCREEN_WIDTHS = (80, 120, 160)
SCREEN_THEMES = {"light": "textual-light", "dark": "textual-dark"}


def shown() -> dict[str, object]:
    work = {"micro_batches": 8.0, "micro_batch_s": 0.0123, "memory_bytes": 15 * 10**9, "memory_limit_bytes": 2 * 10**10}
    members = [a_member(f"m{n}", rank=n, node=f"node{n // 2}", step=1041, **work) for n in range(3)]
    members[1] |= {"micro_batch_s": 0.0131, "waits_for": "no vote of m2 yet"}
    members.append(a_member("m4", rank=None, node="node1", state="starting", step=None, replaces="m3"))
    told = {
        "reasons": ["generation 1: all 4 workers are ready", "generation 2: m3 lost"],
        "reasons_ago_s": [904.0, 2.1],
    }
    window = {"shards": {"3": 1, "7": 1}, "since_step": 1041, "since_s": 2.1}
    return a_state(members=members, step=1041, until=5000, generation=2, remaining_s=7917.0, window=window, **told)


async def draw_top(width: int, theme: str) -> None:
    from elastrain.launcher.watch.top_screen import TopApp

    app = TopApp(RunDir(path=Path("/runs/job")), lambda _: shown(), 0.1)  # type: ignore[arg-type, return-value]
    async with app.run_test(size=(width, 24)) as pilot:
        app.theme = SCREEN_THEMES[theme]
        for _ in range(10):
            await pilot.pause(0.1)
        (FOLDER / f"top-{width}-{theme}.svg").write_text(app.export_screenshot(title="elastrain top"))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        run = WrittenRun(Path(name) / "run", 4).end()
        written = Path(name) / "page.html"
        written.write_text(page(history_of(read_logs(RunDir(path=run.write())), "")))
        for theme in chromium.THEMES:
            for width in PAGE_WIDTHS:
                out = FOLDER / f"report-{width}-{theme}.png"
                chromium.screenshot(written, out, width=width, height=2300, theme=theme, folder=Path(name))
            for width in SCREEN_WIDTHS:
                asyncio.run(draw_top(width, theme))


if __name__ == "__main__":
    main()
