"""Members and views."""

from __future__ import annotations

import pytest

from elastrain.job.world import Member, View


def test_a_members_rank_is_its_position() -> None:
    view = View(generation=1, members=(Member(id="b", node="n1"), Member(id="a", node="n0")))
    assert view.ids == ("b", "a")
    assert view.nodes == {"b": "n1", "a": "n0"}
    assert view.rank("a") == 1
    assert "a" in view and "c" not in view
    with pytest.raises(ValueError, match="not in"):
        view.rank("c")


def test_a_view_names_each_member_once() -> None:
    with pytest.raises(ValueError, match="each member once"):
        View(generation=1, members=(Member(id="a", node="x"), Member(id="a", node="y")))


def test_the_reason_does_not_make_another_view() -> None:
    assert View(generation=1, members=(), reason="start") == View(generation=1, members=(), reason="again")
