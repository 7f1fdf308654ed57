"""Settings of the simulator's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from elastrain.pipeline import planning


@pytest.fixture(autouse=True, scope="module")
def _rarely_collect() -> Iterator[None]:
    """A schedule makes hundreds of thousands of objects, and little of it is cyclic: to look for that takes time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*before)


@pytest.fixture(autouse=True)
def _split_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans of the rule split their backwards, too: with a third action more can go wrong."""
    monkeypatch.setattr(planning, "IS_SPLIT", True)
