"""The recorded transcripts are what the protocol does today: a change of it shows as a difference to be read.

`pytest tests/sim/test_transcripts.py --record-transcripts` writes them anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim import stories
from tests.sim.job import stories as of_jobs

FOLDER = Path(__file__).parent / "transcripts"


STORIES = {
    **dict.fromkeys(stories.STORIES, stories.tell),
    **dict.fromkeys(of_jobs.STORIES, of_jobs.tell),
}


def _protocol(transcript: str) -> list[str]:
    """All but the explanations, which are docstrings: a better sentence changes no protocol."""
    return [line for line in transcript.splitlines() if not line.lstrip().startswith("| ")]


@pytest.mark.parametrize("name", STORIES)
def test_the_transcript_is_what_happens(name: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    told = STORIES[name](name)
    if request.config.getoption("--record-transcripts"):
        path.write_text(told)
    assert _protocol(told) == _protocol(path.read_text()), "read the difference; if it is meant: --record-transcripts"


def test_every_transcript_has_its_story() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(STORIES)
