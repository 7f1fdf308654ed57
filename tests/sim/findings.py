"""Seeds that show planted bugs, kept so that a test plays one schedule where a search plays hundreds.

A planted bug has to show in one of so many schedules. `findings.toml` names one of them for each bug: to play that one
proves as much as the search that came to it. Where it shows the bug no longer, because rules or draws have changed,
the search is made from the first schedule on. `python -m tests.sim.findings` searches for those and writes the table.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice, takewhile
from pathlib import Path

TABLE = Path(__file__).with_name("findings.toml")
Finding = tuple[int, str]
"""Seed and failure of a schedule that a planted bug breaks."""


def _any(seed: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Search:
    """The schedules in which one planted bug has to show: the first `within` whose seed `only` takes."""

    kind: str
    """The table's section: what is simulated."""
    name: str
    within: int
    failure: Callable[[int], str]
    """What the bug breaks in the schedule of a seed; empty where nothing breaks."""
    only: Callable[[int], bool] = _any
    first: int = 0
    """The seed at which they begin."""

    def find(self) -> Finding | None:
        """A schedule that shows the bug: that of the table, or the first; None where none of them does."""
        known = kept().get(self.kind, {}).get(self.name)
        if known is not None and self._has(known):
            failure = self.failure(known)
            if failure:
                return known, failure
        return self.search()

    def search(self) -> Finding | None:
        for seed in self._seeds():
            failure = self.failure(seed)
            if failure:
                return seed, failure
        return None

    def _seeds(self) -> Iterator[int]:
        return islice(filter(self.only, count(self.first)), self.within)

    def _has(self, seed: int) -> bool:
        return seed in takewhile(lambda each: each <= seed, self._seeds())


@cache
def kept() -> dict[str, dict[str, int]]:
    """The table: kind -> name of a planted bug -> seed."""
    return tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}


def _all() -> Iterator[Search]:
    from elastrain.pipeline import planning
    from tests.sim import test_agents, test_pipelined_plants, test_planted_bugs
    from tests.sim.job import disk_plants, isolation_plants, life_plants, plants, straggler_plants

    planning.IS_SPLIT = True  # as `conftest.py` has it for the tests
    for module in (test_agents, test_pipelined_plants, test_planted_bugs):
        yield from map(module.search_for, sorted(module.PLANTS))
    parts = (plants, life_plants, disk_plants, straggler_plants, isolation_plants)
    for planted in (part.PLANTS for part in parts):
        for name in sorted(planted):
            yield planted[name].search


def main() -> int:
    """Write the table anew. The exit code is 1 where a bug is not found."""
    lines: list[str] = []
    missed, kind = [], ""
    for search in _all():
        found = search.find()
        if search.kind != kind:
            kind = search.kind
            lines += ["", f"[{kind}]"]
        if found is None:
            missed.append(f"{search.kind}: {search.name}")
        else:
            lines.append(f"{search.name} = {found[0]}")
    TABLE.write_text("# Written by `python -m tests.sim.findings`.\n" + "\n".join(lines) + "\n")
    sys.stdout.write("".join(f"not found: {each}\n" for each in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
