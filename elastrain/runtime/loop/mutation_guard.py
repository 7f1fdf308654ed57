"""A guard that finds changes of a script to the model's parameters, and refuses them by name. It changes nothing.

The runtime writes parameters through its own memory, which does not change the version counters of the nn.Parameters.
So a changed counter is the script's doing. Writes through `.data` change no counter; sampled values show these. Samples
are taken and compared where the parameters lie: only the results of the comparisons are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.device_reads import DeviceReads

_SAMPLED = 4
"""Number of sampled values per parameter."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WAY_OUT = (
    "and members would come to differ in it. Parameters are moved by the optimizer alone; for what a script moves "
    "itself, such as the average of a mean teacher, make a module of its own, job.register('teacher', module) before "
    "the loop, and move it after `for batch in step`"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sample:
    """The sampled values of one tensor, of which parameters are slices."""

    whole: weakref.ref[Tensor]
    positions: Tensor
    names: Sequence[str]
    """Names of the parameters; each has `_SAMPLED` positions."""
    values: Tensor

    def is_of(self, whole: Tensor) -> bool:
        """Return True if the sample was taken from this very tensor."""
        return self.whole() is whole


class MutationGuard:
    """A guard of a prepared model's parameters. `memory` returns, by name, the tensors of which they are slices now.

    Call `begin` when the training loop starts. Earlier changes are allowed: all members get the first parameters.
    """

    def __init__(self, model: nn.Module, memory: Callable[[], Mapping[str, Tensor]], frozen: Iterable[str]) -> None:
        self._places = [
            (f"{path}.{attribute}" if path else attribute, module, attribute, parameter)
            for path, module in model.named_modules()
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._parameters = [parameter for _, _, _, parameter in self._places]
        self._versions: list[int] = []
        frozen_names = set(frozen)
        self._frozen = [(name, q) for name, _, _, q in self._places if name in frozen_names]
        self._memory = memory
        self._samples: dict[str, _Sample] = {}

    def begin(self) -> None:
        """Start the guard as the loop begins. Earlier changes do not count, and earlier gradients are dropped."""
        self._versions = self._present_versions()
        for parameter in self._parameters:
            parameter.grad = None
        self.settle()

    def settle(self) -> None:
        """Sample the parameters as the runtime left them, after a step or at the start of the loop."""
        self._samples = {key: self._sample(self._samples.get(key), whole) for key, whole in self._memory().items()}

    def check_settled(self, reads: DeviceReads | None = None) -> None:
        """Raise ConfigError if a parameter was written since `settle` or replaced, or if a frozen one was unfrozen.

        May be called until the loop asks for the next run.

        Args:
            reads: Reads whose `fetch` raises instead, if a parameter on a device was written. None: fetch here.
        """
        self.check()
        for name, module, attribute, parameter in self._places:
            if module._parameters.get(attribute) is not parameter:
                raise ConfigError(f"parameter {name!r} was replaced by another after prepare: change layers before it")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was frozen, or in no group of the optimizer, when the model was prepared and "
                    "cannot be trained later: let it require a gradient and give it to the optimizer before prepare, "
                    "and freeze it in the loop until its step comes"
                )
        wanted = reads or DeviceReads()
        for key, whole in self._memory().items():
            sample = self._samples.get(key)
            if sample is not None and sample.is_of(whole):  # else the runtime brought new blocks meanwhile
                wanted.ask(sample.values != _look(whole, sample.positions), partial(self._judge, sample.names))
        if reads is None:
            wanted.fetch()

    def check(self) -> None:
        """Raise ConfigError if the script changed a parameter in place or left a gradient.

        May be called at any time between two backwards.
        """
        versions = self._present_versions()
        if versions != self._versions:
            places = zip(self._places, versions, self._versions, strict=True)
            self._refuse(next(place[0] for place, now, before in places if now != before), "in place")
        self.check_gradients()

    def check_gradients(self) -> None:
        """Raise ConfigError if the script called a backward itself. Do not call it during a step's backward."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                name = next(name for name, _, _, q in self._places if q is parameter)
                raise ConfigError(
                    f"parameter {name!r} has a gradient from outside of step.backward(loss), and no update would apply "
                    "it: add up the losses of a micro-batch and call step.backward(loss) once; for gradients that are "
                    "not to be applied use torch.autograd.grad"
                )

    def _present_versions(self) -> list[int]:
        return [q._version for q in self._parameters]

    def _sample(self, before: _Sample | None, whole: Tensor) -> _Sample:
        """Return a new sample of a tensor, at the positions of the sample `before` if that is of the same tensor."""
        if before is None or not before.is_of(whole):
            positions, names = self._positions(whole)
        else:
            positions, names = before.positions, before.names
        return _Sample(whole=weakref.ref(whole), positions=positions, names=names, values=_look(whole, positions))

    def _positions(self, whole: Tensor) -> tuple[Tensor, Sequence[str]]:
        """Return the positions to sample in a tensor, and the names of the parameters that lie there."""
        positions, names = [], []
        for name, _, _, parameter in self._places:
            offset_bytes = parameter.data_ptr() - whole.data_ptr()
            if parameter.numel() and 0 <= offset_bytes < whole.nbytes:
                start, last = offset_bytes // whole.element_size(), parameter.numel() - 1
                positions += [start + last * part // (_SAMPLED - 1) for part in range(_SAMPLED)]
                names.append(name)
        return torch.tensor(positions, dtype=torch.int64, device="cpu").to(whole.device, non_blocking=True), names

    def _judge(self, names: Sequence[str], changed: Tensor) -> None:
        """Raise ConfigError if a sampled value has changed. `changed`: one byte for each."""
        if bool(changed.any()):
            self._refuse(names[int(changed.nonzero()[0]) // _SAMPLED], "through .data or a view")

    @staticmethod
    def _refuse(name: str, how: str) -> None:
        raise ConfigError(f"parameter {name!r} was changed outside of the optimizer ({how}), {_WAY_OUT}")


def _look(whole: Tensor, positions: Tensor) -> Tensor:
    return whole.index_select(0, positions.to(whole.device)).view(_BITS[whole.element_size()])
