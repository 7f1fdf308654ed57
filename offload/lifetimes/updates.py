"""Clipping and the optimizer's step, block by block: at once after the backward, or each before its next forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.custody import PieceCustody
from elastrain.offload.lifetimes.orders import StepStage
from elastrain.offload.lifetimes.states import BlockStates
from elastrain.offload.lifetimes.values import Kind


class Updates:
    """`due` blocks have gradients that wait for their update. Norms are taken as gradients land."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, states: BlockStates, custody: PieceCustody, conductor: Conductor
    ) -> None:
        self.due: dict[int, torch.Tensor | None] = {}
        self._optimizer = optimizer
        self._states = states
        self._custody = custody
        self._conductor = conductor
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}
        self._is_stepping = False
        self._options: list[dict[str, Any]] = []

    def landed(self, parameter: nn.Parameter) -> None:
        """A gradient is complete, or as far as this backward goes."""
        assert parameter.grad is not None
        self._norms[parameter] = _norm(parameter.grad)
        self._versions[parameter] = parameter.grad._version

    def close_step(self, order: list[nn.Parameter], max_grad_norm: float | None) -> torch.Tensor | None:
        """Let all blocks with gradients be due, clipped by the norm of all; returns that norm.

        It is computed as `torch.nn.utils.clip_grad_norm_` does.
        """
        for block in list(self.due):  # what no forward has used since the last step
            self.update(block)
        for each in order:
            self._look_again(each)
        # A scheduler may change them before a block is updated.
        self._options = [_options_of(group) for group in self._optimizer.param_groups]
        norms = [self._norms[each] for each in order if each in self._norms]
        total = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        scale = None
        if max_grad_norm is not None and total is not None:
            scale = torch.clamp(max_grad_norm / (total + 1e-6), max=1.0)
        self.due = {self._states.block_of[each]: scale for each in order if each in self._norms}
        for parameter in order:
            parameter.grad = None
        return total

    def _look_again(self, parameter: nn.Parameter) -> None:
        """Between backward and step a gradient may have been changed, replaced, forgotten or made by somebody else."""
        grad = parameter.grad
        if grad is None:
            self._norms.pop(parameter, None)
        elif not parameter.requires_grad:
            return
        elif not self._states.is_ours(parameter):
            self._states.keep_gradient(parameter)
            self.landed(parameter)
            self._custody.release()
        elif self._versions.get(parameter) != grad._version or self._states.was_written(parameter):
            self._custody.acquire(self._states.of(Kind.GRADIENT, [self._states.block_of[parameter]]))
            self.landed(parameter)
            self._custody.release()

    def refuse_foreign_step(self, *_: object) -> None:
        """The optimizer's own `step` was called. Raises OffloadConfigError where it was not by us."""
        if not self._is_stepping:
            raise OffloadConfigError(
                "optimizer.step() was called for a model in offload.within: call step(max_grad_norm=…) of what within "
                "returned; it clips, updates and forgets the gradients"
            )

    def update(self, block: int) -> None:
        """One block's update, if it is due."""
        if block not in self.due:
            return
        scale, kinds = self.due.pop(block), (Kind.PARAMETER, Kind.GRADIENT, Kind.STATE)
        held = [piece for kind in kinds for piece in self._states.of(kind, [block])]
        self._conductor.arrive(StepStage.UPDATE, block, held)
        self._custody.change(held)
        parameters = [each for each in self._states.trained(block) if each in self._norms]
        for parameter in parameters:
            parameter.grad = self._states.gradient(parameter)
            if scale is not None:
                parameter.grad.mul_(scale)
        # New states come one parameter at a time: all of a block's would be in memory twice.
        for some in [parameters] if self._states.has_states(block) else [[each] for each in parameters]:
            self._step(some)
            self._states.adopt_optimizer_states(block, some)
        for parameter in parameters:
            parameter.grad = None
            del self._norms[parameter]
        for piece in self._states.of(Kind.GRADIENT, [block]):
            self._custody.drop(piece)
            piece.written = False

    def _step(self, parameters: list[nn.Parameter]) -> None:
        """Let the optimizer see one block's parameters alone, with the options that its step was closed with."""
        wanted, groups = set(parameters), self._optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            for group, options in zip(groups, self._options, strict=True):
                group.update(options, params=[each for each in group["params"] if each in wanted])
            self._is_stepping = True
            self._optimizer.step()
        finally:
            self._is_stepping = False
            for group, before in zip(groups, now, strict=True):
                group.update(before)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """As `clip_grad_norm_` takes it: on CUDA the operator for many tensors has other bits than that for one."""
    return torch._foreach_norm([gradient])[0] if gradient.is_cuda else torch.linalg.vector_norm(gradient)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """All but the parameters, as they are now."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
