"""The order in which several processes take the tests of one run."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.dealing import dealt


@dataclass(frozen=True)
class Named:
    nodeid: str


def named(folder: str, files: int, tests: int) -> list[Named]:
    return [Named(f"tests/{folder}/test_{file}.py::test_{test}") for file in range(files) for test in range(tests)]


ALL = [*named("contract", 9, 5), *named("integration", 20, 3), *named("sim", 4, 4), *named("unit", 50, 6)]


def file_of(item: Named) -> str:
    return item.nodeid.partition("::")[0]


def test_each_test_is_run_once_and_the_tests_of_a_file_follow_one_another() -> None:
    found = dealt(ALL, 4)
    assert sorted(found, key=ALL.index) == ALL
    changes = [
        file_of(item)
        for item, before in zip(found, [None, *found], strict=False)
        if before is None or file_of(item) != file_of(before)
    ]
    assert len(changes) == len(set(changes)) == 83
    for name in changes:
        assert [item for item in found if file_of(item) == name] == [item for item in ALL if file_of(item) == name]


def test_each_process_has_long_tests_among_short_ones_and_short_ones_at_its_end() -> None:
    found = dealt(ALL, 4)
    quarter = len(found) // 4
    for begin in range(0, 4 * quarter, quarter):
        part = [item.nodeid.split("/")[1] for item in found[begin : begin + quarter]]
        assert part.count("integration") == 15
        halves = part[: quarter // 2].count("integration"), part[quarter // 2 :].count("integration")
        assert min(halves) >= 5
        assert set(part[-6:]) == {"unit"}
