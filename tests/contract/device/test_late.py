"""The suites of this folder on the strict test device, in a process that has it: other tests must not have it."""

from __future__ import annotations

import os
import re
import sys

from tests.support import warm


def test_the_suites_hold_on_the_strict_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "late:0"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = warm.run(
        [*command, "tests/contract/device"],
        env={**outer, **warm.THERE, "ELASTRAIN_TEST_DEVICE": "tests.support.late"},
        cwd=warm.ROOT,
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    passed = re.search(r"(\d+) passed", ended.stdout)
    assert passed is not None and int(passed[1]) > 30, ended.stdout
    assert "skipped" not in ended.stdout
