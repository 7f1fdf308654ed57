"""A trial of an optimizer that the script vouches for: it must update each element independently of all others.

Stand-ins for parameters are updated whole and in pieces, as shards are, and both must give the same bits. The trial
works on copies: the user's optimizer, its hooks and all random generators stay unchanged.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from elastrain.errors import ConfigError
from elastrain.runtime.model.watched import token_of
from elastrain.snapshot.digest import checksum

Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]
StandIn = tuple[int, torch.dtype, tuple[int, ...]]  # its group, dtype and shape
_STEPS = 3
# Below and above the sizes at which known optimizers change their method; multiples of 64, as pieces are.
_SHAPES = ((192,), (16384,), (3, 64), (128, 128), (4, 3, 16), (4, 64, 64), (4, 4, 3, 4), (8, 8, 16, 16))
_CUT = 64
_AWAY = 12345  # added to numbers in an optimizer's attributes, to see if they change the result


@functools.cache
def of_all() -> frozenset[str]:
    """Return the names of the attributes of every optimizer. Call it late: making one may import torch's compiler."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))) | {"step", "_opt_called", "_step_count"}


def try_out(name: str, make: Make, groups: Groups, kinds: Sequence[tuple[torch.dtype, set[int]]]) -> frozenset[str]:
    """Try an optimizer, and return the names of the values in its parameter groups that its steps change.

    make: makes an optimizer of these groups. groups: values of each group, without parameters. kinds: dtype of each
    group's parameters, and their numbers of dimensions, 1 to 4. Raises ConfigError, naming the difference.
    """
    stand_ins = [(i, dtype, s) for i, (dtype, dims) in enumerate(kinds) for s in _SHAPES if len(s) in dims]
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        runs = [_Run(make, groups, stand_ins, how) for how in ("shaped", "flat", "cut")]
        shaped, flat, cut = ([run.step(number) for number in range(_STEPS)] for run in runs)
        if not torch.equal(kept[2], torch.get_rng_state()) or kept[0] != random.getstate():
            raise _NotElementwiseError("draws random numbers in its step")
        for run in runs:
            _check_equal(runs[0].groups, run.groups)
        if shaped != flat:
            raise _NotElementwiseError("looks at the shapes of parameters, and shards have flat pieces")
        if flat != cut and (moving := sorted(runs[2].moving)):
            raise _NotElementwiseError(f"counts in its attribute {moving[0]!r}, which is no part of the state")
        if flat != cut:
            raise _NotElementwiseError("lets elements or parameters depend on one another, or on how they are cut")
    except Exception as error:  # whatever a class of the script's may raise
        is_ours = isinstance(error, _NotElementwiseError)
        why = error if is_ours else f"cannot step pieces of parameters by itself ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{name} was vouched for with elementwise=True, but it {why}: shards would be updated otherwise than whole "
            "parameters. Use an optimizer of torch.optim such as AdamW, or keep all that it counts in the state of "
            "each parameter or in its parameter groups"
        ) from error
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    pairs = ((was, key, value) for was, g in zip(groups, runs[0].groups, strict=True) for key, value in g.items())
    return frozenset(key for was, key, value in pairs if repr(was.get(key)) != repr(value))


class _NotElementwiseError(Exception):
    """The reason why an optimizer is not elementwise."""


class _Run:
    """One way to step the stand-ins, with its own optimizer: whole ("flat", "shaped"), or two pieces each ("cut")."""

    def __init__(self, make: Make, groups: Groups, stand_ins: Sequence[StandIn], how: str) -> None:
        self.groups = groups
        """Values of each group after the last step."""
        self.moving: set[str] = set()
        """Names of attributes with numbers that change in each step."""
        self._stand_ins = stand_ins
        self._wholes = self._numbers(0)
        cuts = [slice(_CUT, None), slice(0, _CUT)] if how == "cut" else [slice(None)]
        self._calls = [(cut, [whole[cut] for whole in self._wholes]) for cut in cuts]
        if how == "shaped":
            shapes = [shape for _, _, shape in stand_ins]
            self._calls = [(cuts[0], [w.view(shape) for w, shape in zip(self._wholes, shapes, strict=True)])]
        self._is_cut = how == "cut"
        self._states: dict[Tensor, Any] = {}
        for _, views in self._calls if self._is_cut else ():
            for view, (group, _, _) in zip(views, stand_ins, strict=True):
                self._states[view] = dict(make([{"params": [view], **groups[group]}]).state.get(view, {}))
        self._optimizer = make(self._grouped(self._calls[0][1]))
        self._kept: dict[str, Any] = {}

    def step(self, number: int) -> list[int]:
        """Take one step, and return checksums of all stand-ins."""
        gradients, after, optimizer = self._numbers(number + 1), [], self._optimizer
        for cut, views in self._calls:
            for view, gradient in zip(views, gradients, strict=True):
                view.grad = gradient[cut].view(view.shape).clone()
            if self._is_cut:
                optimizer.param_groups = self._grouped(views)
                optimizer.state.update({view: self._states[view] for view in views})
                vars(optimizer).update({key: self._kept[key] + _AWAY for key in self.moving})
            optimizer.step()
            self._check(views, is_first=number == 0)
            after.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
            _check_equal(after[0], after[-1])
            if self._is_cut:
                self._states.update(optimizer.state)
                optimizer.state.clear()
        self.groups = after[-1]
        return [checksum(whole) for whole in self._wholes]

    def _check(self, views: Sequence[Tensor], *, is_first: bool) -> None:
        if any(all(key is not view for view in views) for key in self._optimizer.state):
            raise _NotElementwiseError("keeps a state that belongs to no parameter")
        own = vars(self._optimizer).items()
        kept = {name: token_of(value) for name, value in own if name == "defaults" or name not in of_all()}
        # A value that only the first step sets may be a cache.
        for key in sorted(key for key in kept if not is_first and self._kept.get(key) != kept[key]):
            if not {type(kept[key]), type(self._kept.get(key))} <= {int, float}:
                raise _NotElementwiseError(f"changes its attribute {key!r} in each step, which is no part of the state")
            self.moving.add(key)
        self._kept = kept

    def _grouped(self, views: Sequence[Tensor]) -> Groups:
        pairs = list(zip(views, self._stand_ins, strict=True))
        return [
            {"params": [view for view, (of, _, _) in pairs if of == index], **group}
            for index, group in enumerate(self.groups)
        ]

    def _numbers(self, seed: int) -> list[Tensor]:
        own = torch.Generator("cpu").manual_seed(seed)
        sizes = [(torch.Size(shape).numel(), dtype) for _, dtype, shape in self._stand_ins]
        return [torch.randn(size, dtype=dtype, generator=own, device="cpu") for size, dtype in sizes]


def _check_equal(groups: Groups, others: Groups) -> None:
    for one, other in zip(groups, others, strict=True):
        for key in sorted(key for key in {**one, **other} if repr(one.get(key)) != repr(other.get(key))):
            raise _NotElementwiseError(f"keeps {key!r} in its groups, which depends on the parameters in them")
