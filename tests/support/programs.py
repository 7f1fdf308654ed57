"""Programs of a step for tests of plans: random ones, and one of blocks that are all alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.plan_values import (
    Gap,
    Kind,
    MemoryPiece,
    Move,
    Point,
    Program,
    Recomputation,
    Share,
    Use,
)


def state(rng: random.Random, length: int) -> tuple[Use, ...]:
    return (Use(point=rng.randrange(length), changes=True),)


def saved(rng: random.Random, length: int) -> tuple[Use, ...]:
    first, last = sorted(rng.sample(range(length), 2))
    return Use(point=first, begins=True), Use(point=last)


def carried(rng: random.Random, length: int) -> tuple[Use, ...]:
    """Born in one step and used up in the next, as a gradient whose update comes before the next forward."""
    first, last = sorted(rng.sample(range(length), 2))
    return Use(point=first), Use(point=last, begins=True)


def parameter(rng: random.Random, length: int) -> tuple[Use, ...]:
    places = sorted(rng.sample(range(length), min(length, 3)))
    changed = rng.randrange(len(places) + 1)  # one more: a frozen one
    return tuple(Use(point=place, changes=index == changed) for index, place in enumerate(places))


def random_program(rng: random.Random, *, points: int, pieces: int) -> Program:
    """Sizes of 1 to 20 bytes, seconds below one."""
    kinds = (state, saved, carried, parameter)
    made = tuple(
        MemoryPiece(
            name=f"piece {number}",
            kind=Kind.STATE,
            size_bytes=rng.randint(1, 20),
            uses=rng.choice(kinds)(rng, points),
        )
        for number in range(pieces)
    )
    steps = (Point(name=f"point {n}", seconds=rng.random(), extra_bytes=rng.randint(0, 5)) for n in range(points))
    return Program(points=tuple(steps), pieces=made)


def blocks(count: int, *, saved_per_block: int = 8, remake_s: float | None = None) -> Program:
    """Forwards, backwards, then updates of `count` blocks of 7 MiB parameters; 0.02 to 0.18 s a point."""
    order = (
        [("F", n) for n in range(count)] + [("B", n) for n in reversed(range(count))] + [("U", n) for n in range(count)]
    )
    at = {name: place for place, name in enumerate(order)}
    seconds = {"F": 0.09, "B": 0.18, "U": 0.02}
    pieces, again = [], []
    for n in range(count):
        f, b, u = at["F", n], at["B", n], at["U", n]
        pieces += [
            MemoryPiece(
                name=f"parameters {n}",
                kind=Kind.PARAMETER,
                size_bytes=7 << 20,
                uses=(Use(point=f), Use(point=b), Use(point=u, changes=True)),
            ),
            MemoryPiece(
                name=f"gradients {n}",
                kind=Kind.GRADIENT,
                size_bytes=7 << 20,
                uses=(Use(point=b, begins=True), Use(point=u)),
            ),
            MemoryPiece(name=f"states {n}", kind=Kind.STATE, size_bytes=14 << 20, uses=(Use(point=u, changes=True),)),
        ]
        first = len(pieces)
        pieces += [
            MemoryPiece(
                name=f"saved {n}.{k}",
                kind=Kind.ACTIVATION,
                size_bytes=3 << 20,
                uses=(Use(point=f, begins=True), Use(point=b)),
            )
            for k in range(saved_per_block)
        ]
        if remake_s is not None:
            inside = tuple(range(first, len(pieces)))
            again.append(Recomputation(name=f"block {n}", pieces=inside, after=f, again=b, seconds=remake_s))
    points = tuple(Point(name=f"{kind}{n}", seconds=seconds[kind], extra_bytes=5 << 20) for kind, n in order)
    return Program(points=points, pieces=tuple(pieces), recomputations=tuple(again))


def all_moves(program: Program) -> Iterator[tuple[Move, ...]]:
    """Every plan of one tier: each gap is left out, or its piece comes back at one of its points."""
    gaps, length = facts.gaps(program), len(program.points)
    ways = [[None, *range(gap.begin + 2, gap.end + 1)] for gap in gaps]
    for reads_at in itertools.product(*ways):
        written: set[tuple[int, int]] = set()
        found = []
        for gap, read_at in zip(gaps, reads_at, strict=True):
            if read_at is not None:
                found.append(_move(program, gap, read_at, written, length))
        yield tuple(found)


def _move(program: Program, gap: Gap, read_at: int, written: set[tuple[int, int]], length: int) -> Move:
    write_after = gap.changed
    if gap.changed is not None:
        version = (gap.piece, gap.changed % length)
        write_after = None if version in written else gap.changed
        written.add(version)
    shares = (Share(tier=0, size_bytes=program.pieces[gap.piece].size_bytes),)
    return Move(gap=gap, write_after=write_after, read_at=read_at, shares=shares)
