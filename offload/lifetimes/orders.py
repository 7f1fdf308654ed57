"""Makes a program of what was seen of one step, for each order in which updates may run. Pure.

Updates of elementwise optimizers may run at the end of the step, or each just before its block's next forward: the
bits are the same, and there the drive has the whole next forward to bring optimizer states back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastrain.offload.lifetimes.recording import Standing
from elastrain.offload.lifetimes.values import Kind, MemoryPiece, Point, Program, Use


class StepStage(Enum):
    """What a block does at a point."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class UpdateOrder(Enum):
    """When blocks are updated."""

    AFTER_BACKWARD = "after the backward"
    BEFORE_FORWARD = "each before its next forward"


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """One block: what its parameters, gradients and optimizer states take.

    `touches` names the blocks whose parameters it uses: itself, and those that it shares weights with.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    touches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One point as it was seen, in the order of the step: what it took, and what it saved for its backward.

    `standing` is there where the point was looked at closely.
    """

    stage: StepStage
    block: int
    seconds: float
    extra_bytes: int = 0
    saved_bytes: int = 0
    standing: Standing | None = None


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """A program, the stage and block of each of its points, and which of its pieces is which.

    A piece is told by its kind and its block; what a forward saved, by the place of that forward.
    """

    order: UpdateOrder
    program: Program
    points: tuple[tuple[StepStage, int], ...]
    pieces: tuple[tuple[Kind, int], ...]


def arrange(blocks: Sequence[BlockSizes], seen: Sequence[Arrival], order: UpdateOrder) -> Arranged:
    """The step in this order. `seen` holds each block's update once, wherever it ran."""
    arrivals = _in_order(seen, order)
    uses: dict[tuple[Kind, int], dict[int, Use]] = {}
    saved: list[tuple[int, int, Use]] = []  # block, bytes, where it is born
    pieces: list[tuple[tuple[Kind, int], MemoryPiece]] = []
    for place, arrival in enumerate(arrivals):
        for block in blocks[arrival.block].touches:
            _use(
                uses, Kind.PARAMETER, block, place, changes=arrival.stage is StepStage.UPDATE and block == arrival.block
            )
        if arrival.stage is StepStage.FORWARD and arrival.saved_bytes:
            saved.append((arrival.block, arrival.saved_bytes, Use(point=place, begins=True)))
        if arrival.stage is StepStage.BACKWARD:
            for block in blocks[arrival.block].touches:
                first = not any(use.changes for use in uses.get((Kind.GRADIENT, block), {}).values())
                _use(uses, Kind.GRADIENT, block, place, changes=True, begins=first)
            pieces += _released(saved, arrival.block, place, blocks)
        if arrival.stage is StepStage.UPDATE:
            _use(uses, Kind.GRADIENT, arrival.block, place)
            _use(uses, Kind.STATE, arrival.block, place, changes=True)
    for (kind, block), found in uses.items():
        size_bytes = _size(blocks[block], kind)
        if size_bytes:
            ordered = tuple(found[place] for place in sorted(found))
            name = f"{kind.value}s of {blocks[block].name}"
            pieces.append(((kind, block), MemoryPiece(name=name, kind=kind, size_bytes=size_bytes, uses=ordered)))
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
        program=Program(points=points, pieces=tuple(piece for _, piece in pieces)),
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
    return [*found, *updates.values()]  # what no forward used


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


def _released(
    saved: list[tuple[int, int, Use]], block: int, place: int, blocks: Sequence[BlockSizes]
) -> list[tuple[tuple[Kind, int], MemoryPiece]]:
    """What the block's last open forward saved: its backward is the end of it."""
    number = next((n for n in reversed(range(len(saved))) if saved[n][0] == block), None)
    if number is None:
        return []
    _, size_bytes, born = saved.pop(number)
    name = f"what {blocks[block].name} saved"
    uses = (born, Use(point=place))
    return [
        ((Kind.ACTIVATION, born.point), MemoryPiece(name=name, kind=Kind.ACTIVATION, size_bytes=size_bytes, uses=uses))
    ]


def _size(block: BlockSizes, kind: Kind) -> int:
    sizes = {
        Kind.PARAMETER: block.parameter_bytes,
        Kind.GRADIENT: block.gradient_bytes,
        Kind.STATE: block.state_bytes,
    }
    return sizes[kind]
