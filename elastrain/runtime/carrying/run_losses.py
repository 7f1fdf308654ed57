"""The losses of a run's micro-batches, as contributions to the step. On a device they travel with the run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from elastrain.device.port import DevicePort
from elastrain.job.values import Contribution

Counted = Callable[[float], Contribution]
"""A function from the value of a micro-batch's loss to its contribution."""


class RunLosses:
    """The contributions of a run's micro-batches so far. The loop's thread adds them and never waits for a device.

    A loss is copied in the loop's stream. So it is there once a later result of that stream has landed.
    """

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._added: list[tuple[Tensor | float, Counted]] = []
        self._sums = [Contribution()]
        """Sums over the first micro-batches, as far as `sum_of` was asked for them."""

    def add(self, loss: Tensor, counted: Counted) -> None:
        """Add the contribution of the next micro-batch."""
        value: Tensor | float = loss.detach().reshape(())
        if self._port.is_host:
            value = float(value)
        elif loss.device.type != "cpu":  # a script may have moved the loss itself
            # Not through the port's side stream, where the engine's copies would wait for this forward.
            value = self._port.empty_pinned((), loss.dtype).copy_(loss.detach().reshape(()), non_blocking=True)
        self._added.append((value, counted))

    @property
    def count(self) -> int:
        """Number of micro-batches that were added."""
        return len(self._added)

    def sum_of(self, count: int) -> Contribution:
        """Return the sum over the first `count` micro-batches. On a device, call it when a later result has landed.

        Numbers are added one after another, so the sum has the same bits on every member.
        """
        while len(self._sums) <= count:
            loss, counted = self._added[len(self._sums) - 1]
            self._sums.append(self._sums[-1] + counted(float(loss)))
        return self._sums[count]
