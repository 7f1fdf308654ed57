"""Whether a store has lost its data is seen by what it says, also where it is no shorter than it was."""

from __future__ import annotations

import pytest

from elastrain.launcher.store.port import Item
from elastrain.launcher.store.standing_keys import is_another

KNOWN = {"count": 2, "node1": 3}
LAST = 3


def items(revisions: dict[str, int], values: dict[str, bytes] | None = None) -> dict[str, Item]:
    said = values or {}
    return {key: Item(key=key, value=said.get(key, b""), revision=r) for key, r in revisions.items()}


@pytest.mark.parametrize(
    ("found", "revision"),
    [
        pytest.param(KNOWN, 3, id="as it was"),
        pytest.param({**KNOWN, "node2": 4}, 4, id="more"),
        pytest.param({"count": 5, "node1": 3}, 5, id="changed"),
        pytest.param({"node1": 3}, 4, id="one is gone"),
        pytest.param({}, 9, id="all are gone"),
        pytest.param({**KNOWN, "roster": 3}, 3, id="a second change of one revision"),
    ],
)
def test_the_same_store_later(found: dict[str, int], revision: int) -> None:
    assert not is_another(items(KNOWN), LAST, items(found), revision)


@pytest.mark.parametrize(
    ("found", "revision"),
    [
        pytest.param({}, 2, id="shorter"),
        pytest.param({"spec": 2, "node2": 5}, 5, id="longer, and it would have said so"),
        pytest.param({"spec": 3, "node2": 5}, 5, id="in the last revision that was known"),
        pytest.param({"count": 1, "node1": 3}, 6, id="an older change of what is known"),
        pytest.param({"spec": 2}, 3, id="as long"),
    ],
)
def test_another_store(found: dict[str, int], revision: int) -> None:
    assert is_another(items(KNOWN), LAST, items(found), revision)


def test_another_value_of_one_revision() -> None:
    assert is_another(items(KNOWN), LAST, items(KNOWN, {"count": b"other"}), 4)
