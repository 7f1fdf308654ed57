"""In which order the processes of a run take its tests, so that both cores have something to do all the time.

xdist gives each process one part of the list, all of the same number of tests, and who has finished takes half of what
another still has, from its end. In the order of the folders two processes compute while two wait for jobs, then all
four wait, and the last tests are jobs of half a minute. So the files of each folder are dealt out to all processes,
those of `integration/` come between short ones of other folders, and at the end of each part are short ones alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

_OTHERS = ("contract", "sim", "property", "unit")
"""The folders whose tests compute or are short, the shortest last."""
_SHORT_AT_THE_END = 0.1
"""The share of each part behind its last test of `integration/`."""


class Item(Protocol):
    @property
    def nodeid(self) -> str: ...


T = TypeVar("T", bound=Item)


def dealt(items: Sequence[T], processes: int) -> list[T]:
    """All of them, part by part; the tests of a file stay together, in their order."""
    files: dict[str, list[T]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    others = [_parts([files[name] for name in files if _folder(name) == folder], processes) for folder in _OTHERS]
    waiting = _parts([files[name] for name in files if _folder(name) not in _OTHERS], processes)
    found = []
    for part in range(processes):
        found += _between(waiting[part], [file for parts in others for file in parts[part]])
    return found


def _folder(name: str) -> str:
    return (*Path(name).parts, "", "")[1]


def _parts(files: Sequence[list[T]], processes: int) -> list[list[list[T]]]:
    parts: list[list[list[T]]] = [[] for _ in range(processes)]
    for file in files:
        min(parts, key=lambda part: sum(map(len, part))).append(file)
    return parts


def _between(waiting: Sequence[list[T]], others: Sequence[list[T]]) -> list[T]:
    places = [((1 - _SHORT_AT_THE_END) * (number + 0.5) / len(waiting), 0, file) for number, file in enumerate(waiting)]
    places += [((number + 0.5) / len(others), 1, file) for number, file in enumerate(others)]
    return [item for _, _, file in sorted(places, key=lambda place: place[:2]) for item in file]
