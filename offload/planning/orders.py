"""Conversion of a measured step to a program, for each order in which updates may run. Pure.

Updates of elementwise optimizers may run at the end of the step, or each just before its block's next forward. The bits
are the same. In the second order, the drive has all of the next forward to bring optimizer states back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastrain.offload.planning.plan_values import Kind, MemoryPiece, Point, Program, Recomputation, Use
from elastrain.offload.planning.step_recording import Standing


def needed_at(place: int) -> int:
    """Return the piece number of the inputs from which the forward at `place` can be computed again.

    No place has it.
    """
    return ~place


class StepStage(Enum):
    """The work of a block at a point."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class UpdateOrder(Enum):
    """The time at which blocks are updated."""

    AFTER_BACKWARD = "after the backward"
    BEFORE_FORWARD = "each before its next forward"


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """One block: the bytes of its parameters, gradients and optimizer states.

    `touches` are the blocks whose parameters it uses: itself, and those that it shares weights with.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    touches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One measured point, in the order of the step: its seconds and memory, and the bytes that it saved for backward.

    `needed_bytes` is the part of `saved_bytes` from which the rest can be computed again, or None if it cannot be.
    `standing` is None unless the point was measured in detail.
    """

    stage: StepStage
    block: int
    seconds: float
    extra_bytes: int = 0
    saved_bytes: int = 0
    needed_bytes: int | None = None
    standing: Standing | None = None


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """One measured step, from which plans are made. Points name blocks by their index in `blocks`."""

    blocks: tuple[BlockSizes, ...]
    points: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        known = range(len(self.blocks))
        named = [each.block for each in self.points] + [other for each in self.blocks for other in each.touches]
        if not self.points or any(each not in known for each in named):
            raise ValueError("a step has at least one point, and each point is one of its blocks'")


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """A program, with the stage and block of each of its points, and the key of each of its pieces.

    A key is the piece's kind and its block. For values that a forward saved, the second item is the place of that
    forward. For the part from which the rest can be computed again, it is `needed_at` of that place.
    """

    order: UpdateOrder
    program: Program
    points: tuple[tuple[StepStage, int], ...]
    pieces: tuple[tuple[Kind, int], ...]


def arrange(blocks: Sequence[BlockSizes], seen: Sequence[Arrival], order: UpdateOrder) -> Arranged:
    """Return the program of the step in this update order. `seen` has each block's update once, wherever it ran."""
    arrivals = _in_order(seen, order)
    uses: dict[tuple[Kind, int], dict[int, Use]] = {}
    saved: list[tuple[Arrival, int]] = []  # forwards with saved values, and their places
    pieces: list[tuple[tuple[Kind, int], MemoryPiece]] = []
    again: list[Recomputation] = []
    for place, arrival in enumerate(arrivals):
        for block in blocks[arrival.block].touches:
            _use(
                uses, Kind.PARAMETER, block, place, changes=arrival.stage is StepStage.UPDATE and block == arrival.block
            )
        if arrival.stage is StepStage.FORWARD and arrival.saved_bytes:
            saved.append((arrival, place))
        if arrival.stage is StepStage.BACKWARD:
            for block in blocks[arrival.block].touches:
                first = not any(use.changes for use in uses.get((Kind.GRADIENT, block), {}).values())
                _use(uses, Kind.GRADIENT, block, place, changes=True, begins=first)
            _release(saved, blocks[arrival.block].name, arrival.block, place, pieces, again)
        if arrival.stage is StepStage.UPDATE:
            _use(uses, Kind.GRADIENT, arrival.block, place)
            _use(uses, Kind.STATE, arrival.block, place, changes=True)
    for (kind, block), found in uses.items():
        size_bytes = _size(blocks[block], kind)
        if size_bytes:
            ordered = tuple(found[place] for place in sorted(found))
            pieces.append(_piece(f"{kind.value}s of {blocks[block].name}", (kind, block), size_bytes, ordered))
    points = tuple(
        Point(
            name=f"the {each.stage.value} of {blocks[each.block].name}",
            seconds=each.seconds,
            extra_bytes=each.extra_bytes,
        )
        for each in arrivals
    )
    return Arranged(
        order=order,
        program=Program(points=points, pieces=tuple(piece for _, piece in pieces), recomputations=tuple(again)),
        points=tuple((each.stage, each.block) for each in arrivals),
        pieces=tuple(key for key, _ in pieces),
    )


def _in_order(seen: Sequence[Arrival], order: UpdateOrder) -> list[Arrival]:
    updates = {each.block: each for each in seen if each.stage is StepStage.UPDATE}
    rest = [each for each in seen if each.stage is not StepStage.UPDATE]
    if order is UpdateOrder.AFTER_BACKWARD:
        return [*rest, *updates.values()]
    found = []
    for each in rest:
        update = updates.pop(each.block, None) if each.stage is StepStage.FORWARD else None
        found += [update, each] if update is not None else [each]
    return [*found, *updates.values()]  # blocks that no forward used


def _use(
    uses: dict[tuple[Kind, int], dict[int, Use]],
    kind: Kind,
    block: int,
    place: int,
    *,
    changes: bool = False,
    begins: bool = False,
) -> None:
    uses.setdefault((kind, block), {})[place] = Use(point=place, changes=changes, begins=begins)


def _release(
    saved: list[tuple[Arrival, int]],
    name: str,
    block: int,
    place: int,
    pieces: list[tuple[tuple[Kind, int], MemoryPiece]],
    again: list[Recomputation],
) -> None:
    """Add the values that the block's last open forward saved to `pieces` and `again`: its backward ends their life."""
    number = next((n for n in reversed(range(len(saved))) if saved[n][0].block == block), None)
    if number is None:
        return
    forward, born = saved.pop(number)
    needed_bytes = min(forward.needed_bytes or 0, forward.saved_bytes)
    uses = (Use(point=born, begins=True), Use(point=place))
    if forward.saved_bytes > needed_bytes:
        if forward.needed_bytes is not None:
            again.append(
                Recomputation(
                    name=f"what {name} saved", pieces=(len(pieces),), after=born, again=place, seconds=forward.seconds
                )
            )
        key, size_bytes = (Kind.ACTIVATION, born), forward.saved_bytes - needed_bytes
        pieces.append(_piece(f"what {name} saved", key, size_bytes, uses))
    if needed_bytes:
        key = Kind.ACTIVATION, needed_at(born)
        pieces.append(_piece(f"what {name} begins from", key, needed_bytes, uses))


def _piece(
    name: str, key: tuple[Kind, int], size_bytes: int, uses: tuple[Use, ...]
) -> tuple[tuple[Kind, int], MemoryPiece]:
    return key, MemoryPiece(name=name, kind=key[0], size_bytes=size_bytes, uses=uses)


def _size(block: BlockSizes, kind: Kind) -> int:
    sizes = {Kind.PARAMETER: block.parameter_bytes, Kind.GRADIENT: block.gradient_bytes, Kind.STATE: block.state_bytes}
    return sizes[kind]
