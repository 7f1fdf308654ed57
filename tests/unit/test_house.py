"""The house's sizes, names and leftovers against the table of `house.toml`: none gets worse, the list only shrinks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import house, table
from tests.support.house import House
from tests.support.shared import once
from tests.support.sources import ROOMS


@pytest.fixture(scope="module")
def today() -> House:
    folder = once("house", lambda made: (made / "measured").write_text(json.dumps(vars(house.measure()))))
    return House(**json.loads((folder / "measured").read_text()))


@pytest.mark.parametrize("figure", table.LIMITS)
def test_nobody_comes_over_a_limit_or_goes_further_over_it(today: House, figure: str) -> None:
    assert table.worse(figure, table.by_figure(today)[figure], table.read().get(figure, {})) == []


@pytest.mark.parametrize("figure", table.LIMITS)
def test_who_has_improved_is_struck_from_the_table_or_lowered(today: House, figure: str) -> None:
    assert table.outdated(figure, table.by_figure(today)[figure], table.read().get(figure, {})) == []


def test_an_exception_is_argued_and_allows_no_more_than_there_is(today: House) -> None:
    assert table.needless(table.by_figure(today)) == []
    assert all(len(each.why.split()) > 5 for names in table.ALLOWED.values() for each in names.values())


def test_the_whole_gets_no_worse(today: House) -> None:
    assert table.worse_totals(today, table.read()["totals"]) == []


def test_no_capability_has_more_code_than_its_budget(today: House) -> None:
    assert table.worse_code(today, table.read()["code_lines"]) == []


# The measure itself: what is planted in a small product is found.

MIXED = '''
class Lower:
    """Two fields, one method."""

    def __init__(self) -> None:
        self.first, self.second = 1, 2

class Upper(Lower):
    """One field of its own, one method."""

    kind: int = 0

    def act(self, a, b, *rest, by=None):
        """Of two lines,
        which do not count."""
        def inner(): ...
        return a  # because
'''
WIRE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Told:
    heard: int
    matched: int
    ignored: int
"""
READER = """
from elastrain.protocol.messages import Told
from elastrain import mixed as m

class Third(m.Lower): ...

def hear(told: Told):
    match told:
        case Told(matched=1):
            return told.heard
"""
PROJECT = """
[project]
name = "small"
dependencies = ["numpy>=1", "etcd-sdk-python", "safetensors>=0.5"]
[project.optional-dependencies]
dev = ["mypy"]
"""


@pytest.fixture
def small(tmp_path: Path) -> House:
    (tmp_path / "elastrain").mkdir()
    for folder in ("elastrain/protocol", *ROOMS):
        (tmp_path / folder).mkdir()
    (tmp_path / "elastrain/mixed.py").write_text(MIXED)
    (tmp_path / "elastrain/protocol/messages.py").write_text(WIRE)
    (tmp_path / "comm/ring.py").write_text(READER)
    (tmp_path / "launcher/ring.py").write_text("import numpy\nimport pyetcd.client\nclass Lower: ...\n")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return house.measure(tmp_path)


def test_an_object_is_counted_with_its_superclasses(small: House) -> None:
    assert small.object_fields["mixed.Upper"] == 3
    assert small.object_methods["mixed.Upper"] == 2
    assert small.object_lines["mixed.Upper"] == 5 + 10
    assert "mixed.Lower" not in small.object_fields
    assert small.object_fields["ring.Lower"] == 0


def test_a_superclass_with_fields_is_found_in_another_file_too(small: House) -> None:
    assert small.inherited_state == {"mixed.Upper": 2, "ring.Third": 2}


def test_functions_are_measured_without_docstring_and_self(small: House) -> None:
    assert small.functions["mixed.Upper.act"] == 3
    assert small.parameters["mixed.Upper.act"] == 4
    assert small.functions["mixed.Upper.act.inner"] == 1


def test_double_names_unread_fields_and_unused_dependencies_are_found(small: House) -> None:
    assert small.double_names == {"Lower": 2}
    assert small.unread_wire_fields == {"messages.Told.ignored": 1}
    assert small.unused_dependencies == {"safetensors": 1}


def test_code_files_and_comments_are_counted(small: House) -> None:
    assert small.code_lines == {"agent": 3, "collectives": 7, "mixed": 8, "step protocol": 6}
    assert small.folder_files == {"elastrain": 1, "elastrain.comm": 1, "elastrain.launcher": 1, "elastrain.protocol": 1}
    assert small.double_files == {"ring": 2}
    assert small.product_files == 4 and small.product_code == 24
    assert small.comments_percent["pure"] == round(100 / (len(MIXED.splitlines()) + len(WIRE.splitlines())), 1)


# The ratchet.


@pytest.mark.parametrize(
    ("size", "listed", "worse", "outdated"),
    [
        (350, {}, False, False),
        (351, {}, True, False),
        (400, {"x": 400}, False, False),
        (420, {"x": 400}, False, False),
        (421, {"x": 400}, True, False),
        (380, {"x": 400}, False, False),
        (359, {"x": 400}, False, True),
        (350, {"x": 351}, False, True),
    ],
)
def test_the_ratchet_turns_one_way(size: int, listed: Mapping[str, float], worse: bool, outdated: bool) -> None:
    assert bool(table.worse("file_lines", {"x": size}, listed)) is worse
    assert bool(table.outdated("file_lines", {"x": size}, listed)) is outdated


def test_an_exception_holds_for_its_name_and_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ALLOWED", {"parameters": {"x": table.Allowed(8, "why")}})
    assert table.worse("parameters", {"x": 8, "y": 7}, {})[0].startswith("y: parameters 7, at most 6")
    assert table.worse("parameters", {"x": 9}, {})[0].startswith("x: parameters 9, at most 8")
    assert table.needless({"parameters": {"x": 8}}) == []
    assert table.needless({"parameters": {"x": 7}}) and table.needless({"parameters": {}})


def test_a_line_for_somebody_who_is_gone_is_to_be_struck() -> None:
    (sentence,) = table.outdated("file_lines", {}, {"gone": 400})
    assert "table.py" not in sentence and table.LOWER in sentence


def test_lowering_strikes_and_lowers_but_lets_nobody_in(small: House) -> None:
    totals = {"function_median": 9, "function_p90": 20, "product_files": 500, "product_code": 60_000}
    listed = {"totals": {**totals, "comments_percent": 0.5}}
    before = {**listed, "inherited_state": {"mixed.Upper": 5}}
    after = table.lowered(small, before)
    assert after["inherited_state"] == {"mixed.Upper": 2}, "ring.Third is not let in"
    moved = table.lowered(small, {**listed, "inherited_state": {"mixed.Upper": 5, "gone": 3}})
    assert moved["inherited_state"] == {"mixed.Upper": 2, "ring.Third": 2}, "but in the place of one that is gone"
    assert after["totals"]["function_median"] == 6 and after["totals"]["comments_percent"] > 0.5
    assert table.tomllib.loads(table.as_toml(after)) == after
