"""Updates of large parameters in parts that fit the processor's cache, each with its part of gradient and states.

An elementwise optimizer makes temporaries as large as the parameter. The kernel maps them page by page, and each
operator passes over all of the parameter. In parts, an update takes half the time, with the same bits. With one thread,
parts begin where the vector loops of torch's kernels begin a round.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PART_ELEMENTS = 48 << 10  # less than `LARGE_BYTES` in float32: temporaries come from the heap, without page faults


class CutParameter:
    """One parameter in parts. The parts' states are views of the parameter's states, and copies of its counters."""

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        self._state = state
        self.parts = _parts(parameter.detach())  # shares the parameter's version, so that autograd sees the change
        for part, gradient in zip(self.parts, _parts(parameter.grad.detach()), strict=True):
            part.grad = gradient
        columns = {key: self._cut(value) for key, value in state.items()}
        self.states = [{key: column[number] for key, column in columns.items()} for number in range(len(self.parts))]

    def _cut(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, torch.Tensor):
            return [value] * len(self.parts)
        return _parts(value) if value.numel() > 1 else [value.clone() for _ in self.parts]

    def keep_counters(self) -> None:
        """Copy the counters of the first part to the parameter after the update."""
        for key, value in self.states[0].items():
            if not isinstance(value, torch.Tensor):
                self._state[key] = value
            elif value.numel() == self._state[key].numel() == 1:
                self._state[key].copy_(value)


def can_be_cut(parameter: torch.Tensor, state: dict[str, Any] | None, options: dict[str, Any]) -> bool:
    """Return True if an update in parts has the same bits as a whole one, and is faster."""
    if not state or parameter.is_cuda or parameter.numel() <= PART_ELEMENTS or parameter.grad is None:
        return False
    if any(each is None for each in state.values()) or torch.get_num_threads() > 1:
        return False  # states do not exist yet, or several threads would begin at other elements
    if any(options.get(each) for each in ("foreach", "fused", "differentiable")):
        return False
    large = [each for each in state.values() if isinstance(each, torch.Tensor) and each.numel() > 1]
    return all(
        each.shape == parameter.shape and each.stride() == parameter.stride() for each in (parameter.grad, *large)
    )


@contextmanager
def cut(
    parameters: Sequence[torch.Tensor], states: MutableMapping[torch.Tensor, Any], options: dict[str, Any]
) -> Iterator[list[torch.Tensor]]:
    """Provide the tensors that the optimizer updates in place of the parameters: parts of the large ones."""
    found, several = list[torch.Tensor](), list[CutParameter]()
    for each in parameters:
        if not can_be_cut(each, states.get(each), options):
            found.append(each)
            continue
        several.append(CutParameter(each, states[each]))
        found += several[-1].parts
        states.update(zip(several[-1].parts, several[-1].states, strict=True))
    try:
        yield found
    finally:
        for one in several:
            one.keep_counters()
            for part in one.parts:
                states.pop(part, None)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parts of a dense tensor in the order of memory."""
    found: tuple[torch.Tensor, ...] = torch.split(tensor.as_strided((tensor.numel(),), (1,)), PART_ELEMENTS)
    return found
