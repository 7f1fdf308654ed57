"""What blocks compute, as numbers that depend on everything that went into them.

A stale parameter, a mixed-up micro-batch, a wrong order of addition or a missing contribution is another number. Only
integers are hashed, so that every process has the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

Activation = tuple[int, int]
"""The stream, and the output of the block that a later one takes too (0 where that does not cross)."""
Gradient = tuple[int, int, int]
"""Of the stream, of the output that a later block takes, and the contribution of the micro-batch."""
AUTOCAST = 7
"""The autocast state in which every loop calls `step.backward`."""

_FORWARD, _BACKWARD, _SKIP, _WEIGHT, _LOSS, _TOLD, _ADD, _UPDATE, _BATCH, _LABEL = range(10)


@dataclass(frozen=True)
class Model:
    """`blocks` blocks; the first and the last share one weight; block `taker` takes the output of `giver` too."""

    blocks: int
    giver: int
    taker: int

    def initial(self) -> tuple[int, ...]:
        return tuple(hash((1, self._home(block))) for block in range(self.blocks))

    def batch(self, step: int, micro_batch: int) -> Activation:
        return hash((_BATCH, step, micro_batch)), 0

    def loss(self, step: int, micro_batch: int, activation: Activation) -> Gradient:
        told = hash((_TOLD, activation[0], step, micro_batch))
        return hash((_LOSS, activation[0], hash((_LABEL, step, micro_batch)))), 0, told

    def forward(self, block: int, weight: int, activation: Activation) -> Activation:
        stream, given = activation
        taken = given if block == self.taker else 0
        out = hash((_FORWARD, block, weight, stream, taken))
        if block == self.giver:
            return out, out
        return out, (0 if block >= self.taker else given)

    def backward(
        self, block: int, weight: int, activation: Activation, gradient: Gradient, autocast: int
    ) -> tuple[int, Gradient]:
        """The block's weight gradient, and the gradient of what it took."""
        stream, given = activation
        of_stream, of_given, told = gradient
        taken = given if block == self.taker else 0
        coming = of_given if block == self.giver else 0
        seen = (block, weight, stream, taken, of_stream, coming, autocast)
        weight_gradient = hash((_WEIGHT, *seen))
        if block == self.taker:
            of_given = hash((_SKIP, *seen))
        elif block == self.giver:
            of_given = 0
        return weight_gradient, (hash((_BACKWARD, *seen)), of_given, told)

    def add(self, before: int, weight_gradient: int, told: int) -> int:
        return hash((_ADD, before, weight_gradient, told))

    def update(self, weights: tuple[int, ...], folded: tuple[int, ...]) -> tuple[int, ...]:
        """New weights from the folded gradient of each block; of a shared weight from those of all its lanes."""
        lanes = [tuple(f for b, f in enumerate(folded) if self._home(b) == home) for home in range(self.blocks)]
        return tuple(hash((_UPDATE, weights[b], *lanes[self._home(b)])) for b in range(self.blocks))

    def _home(self, block: int) -> int:
        return 0 if block == self.blocks - 1 else block


def fold(runs: list[int]) -> int:
    return hash(tuple(runs))
