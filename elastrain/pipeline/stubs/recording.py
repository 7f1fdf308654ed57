"""Records of what a tracing pass saw at the entries of blocks, and the block graph made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.stubs.fakes import BlockOutputs, Given, shape_of
from elastrain.pipeline.stubs.origins import Origins
from elastrain.pipeline.stubs.warm_up import BlockEntry


@dataclass(frozen=True)
class SeenEntry:
    """The numbers of the tensors that a block took and returned in one entry."""

    taken: Mapping[int, int]
    """Index of an argument that is an activation -> its number."""
    returned: Mapping[int, int]
    """Index of a tensor in the result -> its number."""


@dataclass
class EnteredBlock:
    """The record of one block in a tracing pass."""

    place: int
    """Index in the list of block names."""
    first: BlockEntry | None = None
    """The first entry, for a later forward on zeros. None if its arguments cannot be described."""
    outputs: dict[Given, BlockOutputs] = field(default_factory=dict)
    entries: list[SeenEntry] = field(default_factory=list)
    flops: int = 0
    saved_bytes: int = 0
    changed: set[int] = field(default_factory=set)
    """Ids of the attribute dicts of its modules that the block has changed, and of the dicts and lists in them."""

    def enter(self, entry: SeenEntry, flops: int, saved_bytes: int, changed: set[int]) -> None:
        """Add one entry of the block.

        The values add up: no cut lies between two entries, but a tensor of the second entry may cross a cut above.
        """
        self.entries.append(entry)
        self.flops += flops
        self.saved_bytes += saved_bytes
        self.changed |= changed


Crossing = tuple[tuple[int, ...], ...]


def graph_of_entries(
    blocks: Sequence[str], places: Mapping[int, int], entered: Sequence[EnteredBlock], origins: Origins
) -> tuple[BlockGraph, Crossing]:
    """Return the block graph, and the numbers of the tensors that cross each cut."""
    crossing = _crossing(entered, origins)
    never_entered = tuple(_never_entered(blocks, places))
    graph = BlockGraph(
        blocks=tuple(blocks[each.place] for each in entered),
        flops=tuple(each.flops for each in entered),
        crossings=tuple(tuple(shape_of(origins.shapes[number]) for number in numbers) for numbers in crossing),
        illegal=origins.illegal(dict(never_entered)),
        never_entered=never_entered,
    )
    return graph, crossing


def _crossing(entered: Sequence[EnteredBlock], origins: Origins) -> Crossing:
    """Return, for each cut, the tensors that blocks behind it take from before it, in order of first appearance."""
    found: list[list[int]] = [[] for _ in range(len(entered) + 1)]
    for at, each in enumerate(entered):
        for number in [entry.taken[index] for entry in each.entries for index in sorted(entry.taken)]:
            for cut in range(origins.home[number] + 1, at + 1):
                if number not in found[cut]:
                    found[cut].append(number)
    return tuple(map(tuple, found))


def _never_entered(blocks: Sequence[str], places: Mapping[int, int]) -> Iterable[tuple[str, str]]:
    """Yield (block, neighbour) for blocks that were not entered.

    The neighbour is the next block that was entered, else the one before, preferably in the same list of layers.
    """
    for place, name in enumerate(blocks):
        if place not in places:
            entered = [other for other in (*range(place, len(blocks)), *reversed(range(place))) if other in places]
            beside = [other for other in entered if blocks[other].rpartition(".")[0] == name.rpartition(".")[0]]
            yield name, blocks[(beside or entered)[0]]
