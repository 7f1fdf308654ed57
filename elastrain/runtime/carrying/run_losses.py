"""Losses and figures of a run's micro-batches, as contributions to the step. On a device they travel with the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from elastrain.device.port import DevicePort
from elastrain.job.values import Contribution, Sums, added

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
        self._figures: list[tuple[str, float | Tensor]] = []
        """Figures of the micro-batch that is being computed."""

    def note(self, name: str, value: float | Tensor) -> None:
        """Note a figure of the next micro-batch: a number, or a tensor of one element."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            self._figures.append((name, self._copied(value)))
        else:
            self._figures.append((name, float(value)))

    def add(self, loss: Tensor, counted: Counted) -> None:
        """Add the contribution of the next micro-batch."""
        figures, self._figures = self._figures, []
        if figures:
            counted = _with_figures(counted, figures)
        self._added.append((float(loss.detach()) if self._port.is_host else self._copied(loss), counted))

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

    def _copied(self, value: Tensor) -> Tensor:
        value = value.detach().reshape(())
        if value.device.type == "cpu":  # a script may have moved the loss itself
            return value
        # Not through the port's side stream, where the engine's copies would wait for this forward.
        return self._port.empty_pinned((), value.dtype).copy_(value, non_blocking=True)


def _with_figures(counted: Counted, figures: list[tuple[str, float | Tensor]]) -> Counted:
    def both(loss: float) -> Contribution:
        sums: Sums = ()
        for name, value in figures:
            sums = added(sums, ((name, float(value)),))
        return replace(counted(loss), sums=sums)

    return both
