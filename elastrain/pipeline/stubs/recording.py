"""From what a tracing pass saw at the entries of blocks to the block graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.stubs.fakes import BlockOutputs, Given, shape_of
from elastrain.pipeline.stubs.origins import Origins


@dataclass(frozen=True)
class SeenEntry:
    """The numbers of what a block took and returned in one entry of it."""

    taken: Mapping[int, int]
    """Index of an argument that is an activation -> the tensor's number."""
    returned: Mapping[int, int]
    """Index of a tensor among what it returned -> its number."""


@dataclass
class EnteredBlock:
    """What was seen of one block."""

    place: int
    """Among the blocks as they were named."""
    outputs: dict[Given, BlockOutputs] = field(default_factory=dict)
    entries: list[SeenEntry] = field(default_factory=list)
    flops: int = 0
    saved_bytes: int = 0
    changed: set[int] = field(default_factory=set)
    """By id: what it has changed of its modules' attributes, and of the dicts and lists in them."""

    def enter(self, entry: SeenEntry, flops: int, saved_bytes: int, changed: set[int]) -> None:
        """Between two entries lies no cut; what it takes in the second may cross one above."""
        self.entries.append(entry)
        self.flops += flops
        self.saved_bytes += saved_bytes
        self.changed |= changed


Crossing = tuple[tuple[int, ...], ...]


def graph_of_entries(
    blocks: Sequence[str], places: Mapping[int, int], entered: Sequence[EnteredBlock], origins: Origins
) -> tuple[BlockGraph, Crossing]:
    """Make the graph; also the numbers of the tensors that cross each cut."""
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
    """By cut: what a block behind it takes of what lives before it, in order of first appearance."""
    found: list[list[int]] = [[] for _ in range(len(entered) + 1)]
    for at, each in enumerate(entered):
        for number in [entry.taken[index] for entry in each.entries for index in sorted(entry.taken)]:
            for cut in range(origins.home[number] + 1, at + 1):
                if number not in found[cut]:
                    found[cut].append(number)
    return tuple(map(tuple, found))


def _never_entered(blocks: Sequence[str], places: Mapping[int, int]) -> Iterable[tuple[str, str]]:
    """(block, its neighbour): the next one that was entered, or else the one before, in the same list of layers."""
    for place, name in enumerate(blocks):
        if place not in places:
            entered = [other for other in (*range(place, len(blocks)), *reversed(range(place))) if other in places]
            beside = [other for other in entered if blocks[other].rpartition(".")[0] == name.rpartition(".")[0]]
            yield name, blocks[(beside or entered)[0]]
