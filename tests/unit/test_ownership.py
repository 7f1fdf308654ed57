"""Parts of the machines write their own fields only. `tests/support/ownership.py` states the rule."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.ownership import foreign_writes, writes_in
from tests.support.sources import Source

FOLDERS = ["elastrain/member", "launcher/core"]
"""Folders whose classes are held to the rule. Each is looked at with the classes that it defines itself."""

OWNER = Source(
    "machine.owner",
    textwrap.dedent(
        """
        @dataclass
        class Record:
            version: int = 0
            kept: dict[int, str] = field(default_factory=dict)
            _digest: int | None = None

        class Owner:
            def __init__(self) -> None:
                self.step = 0
                self.names: set[str] = set()
                self.records: dict[int, Record] = {}

            def find(self, shard: int) -> Record | None:
                return self.records.get(shard)

            def __getitem__(self, shard: int) -> Record:
                return self.records[shard]

            def add(self, name: str) -> None:
                self.names.add(name)
        """
    ),
)
OTHER = """
class Other:
    def __init__(self, owner: Owner) -> None:
        self._owner, self._seen = owner, 0
        self._own: dict[int, list[int]] = {}

    def act(self, record: Record, shard: int) -> None:
        PLANTED
"""


def _found(planted: str, more: str = "") -> list[str]:
    code = OTHER.replace("PLANTED", planted.replace("\n", "\n        "))
    return writes_in([OWNER, Source("machine.other", f"{code}{more}")])


@pytest.mark.parametrize(
    "planted",
    [
        "self._owner.step = 1",
        "self._owner.step += 1",
        "self._owner.step: int = 1",
        "self._seen, self._owner.step = 1, 2",
        "del self._owner.step",
        "setattr(self._owner, 'step', 1)",
        "self._owner.names.add('a')",
        "self._owner.names |= {'a'}",
        "self._owner.records[shard] = record",
        "del self._owner.records[shard]",
        "record.version = 1",
        "record.kept[shard] = 'a'",
        "record.kept.pop(shard)",
        "self._owner[shard].version = 1",
        "self._owner.find(shard).kept.clear()",
        "self._owner.records[shard].kept.setdefault(1, '')",
        "owner = self._owner\nowner.names.clear()",
        "names = self._owner.names\nnames.discard('a')",
        "kept = record.kept\nkept.update({})",
        "for each in self._owner.records.values():\n    each.version = 1",
        "if (held := self._owner.find(shard)) is not None:\n    held.version = 1",
        "for self._owner.step in range(3):\n    pass",
        "unknown(shard).field = 1",
        "unknown(shard).field.append(1)",
    ],
)
def test_a_write_into_a_field_of_another_object_is_found(planted: str) -> None:
    assert len(_found(planted)) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        "self._seen = self._owner.step",
        "self._own.setdefault(shard, []).append(1)",
        "for each in self._own.values():\n    each.clear()",
        "new = Record(version=1)\nnew.version = 2\nnew.kept[1] = 'a'",
        "self._owner.add('a')",
        "names = set(self._owner.names)\nnames.add('a')",
        "names = sorted(self._owner.names)\nnames.pop()",
        "other: Other = self\nother._seen = 1",
    ],
)
def test_writes_to_own_fields_and_new_objects_are_allowed(harmless: str) -> None:
    assert _found(harmless) == []


def test_a_record_is_written_by_the_module_that_defines_it() -> None:
    """The fields with an underscore are left to the record's own methods."""
    writer = "class Writer:\n    def act(self, record: Record) -> None:\n        record.FIELD = 1\n"
    for name, count in (("version", 0), ("_digest", 1)):
        source = Source(OWNER.module, OWNER.text + writer.replace("FIELD", name))
        assert len(writes_in([source])) == count


def test_a_function_of_a_module_is_looked_at_too() -> None:
    assert _found("pass", "\ndef act(owner: Owner) -> None:\n    owner.step = 1\n") == ["machine.other:11: owner.step"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_parts_write_their_own_fields_only(folder: str) -> None:
    found = foreign_writes([folder])
    assert not found, "give the owner a method for each of these:\n" + "\n".join(found)
