"""The version's module, the changelog's topmost heading, and the tag of the commit, if it has one, say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import date

import pytest

from elastrain.version import __version__
from tests.support.sources import ROOT

HEADING = re.compile(
    r"^## (?P<version>\d+\.\d+\.\d+)(?:, [^,\n]*[^\d\n])?, (?P<when>not tagged yet|\d{4}-\d\d-\d\d)$", re.M
)


def topmost(changelog: str) -> tuple[str, str]:
    """Version and date of the first heading. Raises AssertionError if it is none of a version."""
    first = next(line for line in changelog.splitlines() if line.startswith("## "))
    found = HEADING.fullmatch(first)
    assert found is not None, f'a version\'s heading is its number and its date, or "not tagged yet": {first}'
    return found["version"], found["when"]


def test_the_changelogs_topmost_heading_is_this_version_with_a_date_that_is_one() -> None:
    version, when = topmost((ROOT / "CHANGELOG.md").read_text())
    assert version == __version__
    assert when == "not tagged yet" or date.fromisoformat(when) >= date(2026, 11, 23)


@pytest.mark.parametrize("heading", ["## 0.2", "## 0.2.0", "## 0.2.0, soon", "## Next, 2026-12-01"])
def test_another_heading_is_found(heading: str) -> None:
    with pytest.raises(AssertionError, match="a version's heading"):
        topmost(f"# Changelog\n\n{heading}\n\n## 0.1.0, 2026-11-23\n")


def test_a_tag_of_this_commit_is_this_version() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    told = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True)
    if told.returncode != 0:
        pytest.skip("these sources are not in a git repository")
    assert set(told.stdout.split()) <= {f"v{__version__}"}
