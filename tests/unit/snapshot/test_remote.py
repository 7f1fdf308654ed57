"""Stores that fsspec knows: whatever their libraries raise is one sentence."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import put, try_out, visible

fsspec = pytest.importorskip("fsspec")


class StoreError(Exception):
    """Neither an OSError nor a ValueError."""


class Failing(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec is not annotated
    """Answers each call as a store does whose credentials are wrong."""

    protocol = "failing"

    def __getattribute__(self, name: str) -> Any:
        if name in ("ls", "isdir", "exists", "open", "makedirs", "rm_file", "size", "cat_file"):
            raise StoreError("403:\n  the signature does not match")
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def registered() -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)


@pytest.mark.parametrize(
    "act",
    [
        visible,
        try_out,
        lambda place: place.exists(),
        lambda place: place.open("file"),
        lambda place: place.remove("file"),
        lambda place: put(place, "file", b"data"),
    ],
)
def test_errors_of_a_stores_library_are_one_sentence(act: Any) -> None:
    with pytest.raises(CheckpointError, match=r"failed: 403: the signature does not match [(]StoreError[)]$"):
        act(place_at("failing://folder"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nowhere://x", "nowhere://x names no place: "),
        ("needy://x", "^needy://x needs the library of its store: a_package_that_is_not_here.Store"),
        ("picky://x", r"picky://x cannot be used: no credentials [(]StoreError[)]$"),
    ],
)
def test_a_store_that_cannot_be_asked_at_all_is_one_sentence(url: str, says: str) -> None:
    def refuse() -> None:
        raise StoreError("no credentials")

    class Picky(Failing):
        protocol = "picky"

        def __init__(self, **_: Any) -> None:
            refuse()

    fsspec.register_implementation("needy", "a_package_that_is_not_here.Store", clobber=True)
    fsspec.register_implementation("picky", Picky, clobber=True)
    with pytest.raises(CheckpointError, match=says):
        place_at(url)


def test_without_fsspec_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"s3://x needs fsspec: pip install 'elastrain\[remote\]'$"):
        place_at("s3://x")
