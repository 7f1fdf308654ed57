"""Clipping and the optimizer's step, block by block: directly after the backward, or each before its next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.optim import optimizer as torch_optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.block_states import BlockStates
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.update_parts import cut
from elastrain.offload.planning.orders import StepStage
from elastrain.offload.planning.plan_values import Kind


class Updates:
    """The updates of all blocks. Blocks in `due` have gradients that wait for their update.

    The norm of each gradient is taken when it arrives. `shows_gradients` is True if hooks of the program must see this
    step's gradients before they are forgotten.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, states: BlockStates, custody: PieceStore, conductor: Conductor
    ) -> None:
        self.due: dict[int, torch.Tensor | None] = {}
        self.shows_gradients = False
        self._optimizer = optimizer
        self._states = states
        self._custody = custody
        self._conductor = conductor
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}
        # By block, then by optimizer group; values are the optimizer states at the time of `close_step`.
        self._due_in: dict[int, list[dict[nn.Parameter, dict[str, Any] | None]]] = {}
        self._others: dict[int, list[nn.Parameter]] = {}  # by block: parameters with gradients and no update
        self._updated: dict[int, tuple[list[nn.Parameter], bool]] = {}  # by block; True if others keep gradients
        self._options: list[dict[str, Any]] = []

    def hooks(self, when: str) -> list[Callable[..., Any]]:
        """Return the program's hooks that run before ("pre") or after ("post") the optimizer's step."""
        own = getattr(self._optimizer, f"_optimizer_step_{when}_hooks").values()
        all_ = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()
        return [each for each in (*all_, *own) if each != self.refuse_foreign_step]

    def run_hooks(self, when: str) -> None:
        """Call these hooks as `optimizer.step()` does, once for the whole step."""
        for each in self.hooks(when):
            each(self._optimizer, (self._optimizer,), {})

    def landed(self, parameter: nn.Parameter) -> None:
        """Take the norm of a gradient that this backward has completed."""
        gradient = parameter.grad
        assert gradient is not None
        # `clip_grad_norm_` does the same: on CUDA the operator for many tensors gives other bits than the one for one
        # tensor.
        norm = torch._foreach_norm([gradient])[0] if gradient.is_cuda else torch.linalg.vector_norm(gradient)
        self._norms[parameter], self._versions[parameter] = norm, gradient._version

    def close_step(
        self, order: list[nn.Parameter], max_grad_norm: float | None, *, only_finite: bool
    ) -> torch.Tensor | None:
        """Mark all blocks with gradients as due, clipped by the norm of all gradients; return that norm.

        With `only_finite`, an infinite or NaN norm drops the gradients, and no block is due. The norm is computed as
        `torch.nn.utils.clip_grad_norm_` does. As with `optimizer.zero_grad()`, parameters that are not in the optimizer
        keep their gradients, and the next backward adds to them.
        """
        if max_grad_norm is not None:
            _check_separate(order)
        for block in list(self.due):  # blocks that no forward has used since the last step
            self.update(block)
        self.shows_gradients = False
        self._look_again(order)
        norms = self._as_torch_adds_them([each for each in order if each in self._norms])
        total: torch.Tensor | None = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        if only_finite and total is not None and not torch.isfinite(total):
            self._forget()
            return total
        scale = None
        if max_grad_norm is not None and total is not None:
            scale = torch.clamp(max_grad_norm / (total + 1e-6), max=1.0)
        self.shows_gradients = bool(self.hooks("post"))
        if self.hooks("pre"):
            if scale is not None:
                self._scale_all(scale)
                scale = None
            self.run_hooks("pre")
            self._look_again(order)
        # A scheduler may change the options before a block is updated.
        self._options = [_options_of(group) for group in self._optimizer.param_groups]
        for parameter in self._close(scale):
            parameter.grad = None
        # A graph from before the step must be refused, and one from after it must not, whenever the update runs.
        increment_version([each for groups in self._due_in.values() for group in groups for each in group])
        return total

    def _scale_all(self, scale: torch.Tensor) -> None:
        """Clip all gradients at once, since hooks may read them before the first update."""
        for block in sorted({self._states.block_of[each] for each in self._norms}):
            held = self._states.of(Kind.GRADIENT, [block])
            self._custody.acquire(held)
            self._custody.change(held)
            for each in self._norms:
                if self._states.block_of[each] == block and each.grad is not None:
                    each.grad.mul_(scale)
            self._custody.release()

    def _as_torch_adds_them(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Return the norms grouped by dtype, in torch's own order, so that their sum has the same bits."""
        if not parameters:
            return []  # torch raises an error for an empty list
        # Only sizes and dtypes are read: the gradients themselves may be out of memory.
        grouped = _group_tensors_by_device_and_dtype([[each.grad for each in parameters]], with_indices=True)
        return [self._norms[parameters[number]] for _, numbers in grouped.values() for number in numbers]

    def _close(self, scale: torch.Tensor | None) -> set[nn.Parameter]:
        """Record which updates are due, and return the optimizer's present parameters.

        A parameter that is frozen, thawed or given to the optimizer later is updated as if the update had run at once.
        """
        groups = self._optimizer.param_groups
        own = {each for group in groups for each in group["params"]}
        self.due = {self._states.block_of[each]: scale for each in self._norms if each in own or scale is not None}
        self._due_in = {block: [{} for _ in groups] for block in self.due}
        for number, group in enumerate(groups):
            for each in group["params"]:
                if each in self._norms:
                    self._due_in[self._states.block_of[each]][number][each] = self._optimizer.state.get(each)
        self._others = {block: [] for block in self.due}
        for each in self._norms:
            if each not in own:
                self._versions.pop(each)  # its norm counts in the next step, too
                self._others.get(self._states.block_of[each], []).append(each)
        self._norms.clear()
        return own

    def _forget(self) -> None:
        """Drop the gradients of the optimizer's parameters without an update."""
        own = {each for group in self._optimizer.param_groups for each in group["params"]}
        others = [each for each in self._norms if each not in own]
        for each in own:
            each.grad = None
        for each in others:
            self._versions.pop(each)  # as in `_close`
        kept = {self._states.block_of[each] for each in others}
        forgotten = {self._states.block_of[each] for each in self._norms} - kept
        for piece in self._states.of(Kind.GRADIENT, sorted(forgotten)):
            self._custody.drop(piece)
            piece.written = False
        self._norms.clear()

    def _look_again(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take norms again of gradients that the program changed, replaced or added between backward and step."""
        self._states.part_gradients(parameters)
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                self._norms.pop(parameter, None)
            elif not self._states.is_ours(parameter):
                self._states.keep_gradient(parameter)
                self.landed(parameter)
                self._custody.release()
            elif self._versions.get(parameter) != grad._version or self._states.was_written(parameter):
                self._custody.acquire(self._states.of(Kind.GRADIENT, [self._states.block_of[parameter]]))
                self.landed(parameter)
                self._custody.release()

    def refuse_foreign_step(self, *_: object) -> None:
        """Raise OffloadConfigError, since the program called the optimizer's own `step`."""
        raise OffloadConfigError(
            "optimizer.step() was called for a model in offload.within: call step(max_grad_norm=…) of what within "
            "returned; it clips, updates and forgets the gradients"
        )

    def update(self, block: int) -> None:
        """Update one block if its update is due."""
        if block not in self.due:
            return
        kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.STATE)
        held = [piece for kind in kinds for piece in self._states.of(kind, [block])]
        self._conductor.arrive(StepStage.UPDATE, block, held)
        self._custody.change(held)
        scale = self.due.pop(block)  # no error is raised from here on
        groups = self._due_in.pop(block)
        parameters = [each for group in groups for each in group]
        given = [(each, each.grad) for each in parameters]  # gradients made since the step, for the next one
        for parameter in parameters:
            parameter.grad = self._states.gradient(parameter)
        others = [each for each in self._others.pop(block) if self._states.is_ours(each)]
        for parameter in (*parameters, *others):
            if scale is not None and parameter.grad is not None:
                parameter.grad.mul_(scale)
        # New states are adopted one parameter at a time; otherwise all states of a block would be in memory twice.
        with self._with_former_states({each: state for group in groups for each, state in group.items()}):
            for some in [groups] if self._states.has_states(block) else _one_by_one(groups):
                self._step(some)
                self._states.adopt_optimizer_states(block, [each for group in some for each in group])
        self._updated[block] = parameters, bool(others)
        if not self.shows_gradients:
            self.forget_updated()
            for parameter, grad in given:
                parameter.grad = grad

    def forget_updated(self) -> None:
        """Drop gradients that were used in an update. Parameters outside of the optimizer keep theirs."""
        for block, (parameters, has_others) in self._updated.items():
            for parameter in parameters:
                parameter.grad = None
            for piece in self._states.of(Kind.GRADIENT, [block]):
                if not has_others:
                    self._custody.drop(piece)
                piece.written = False
        self._updated.clear()

    @contextmanager
    def _with_former_states(self, former: Mapping[nn.Parameter, dict[str, Any] | None]) -> Iterator[None]:
        """Use the optimizer states from when the step was closed.

        Later changes by the program apply after the update.
        """
        states, now = self._optimizer.state, {each: self._optimizer.state.get(each) for each in former}
        _put(states, {each: state for each, state in former.items() if state is not now[each]})
        yield
        _put(states, {each: state for each, state in now.items() if state is not former[each]})

    def _step(self, parameters: Sequence[Iterable[nn.Parameter]]) -> None:
        """Run the optimizer for these parameters only, by group, with the options from when the step was closed."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            with ExitStack() as stack:
                # The versions were already incremented when the step was closed.
                stack.enter_context(_unsafe_preserve_version_counter(tuple(chain.from_iterable(parameters))))
                for group, options, wanted in zip(groups, self._options, parameters, strict=False):
                    parts = stack.enter_context(cut(list(wanted), self._optimizer.state, options))
                    group.update(options, params=parts)
                for group in groups[len(parameters) :]:  # groups that were added since then
                    group.update(params=[])
                step: Callable[..., Any] = type(self._optimizer).step
                getattr(step, "__wrapped__", step)(self._optimizer)  # without hooks, which run once for the whole step
                vars(self._optimizer)["_opt_called"] = True  # schedulers check this flag
        finally:
            for group, before in zip(groups, now, strict=True):
                group.update(before)


def _put(states: dict[torch.Tensor, Any], found: Mapping[nn.Parameter, Any]) -> None:
    """Set the states of these parameters; None removes the state."""
    for each, state in found.items():
        if state is None:
            states.pop(each, None)
        else:
            states[each] = state


def _one_by_one(groups: Sequence[Iterable[nn.Parameter]]) -> list[list[list[nn.Parameter]]]:
    return [
        [[each] if number == own else [] for number in range(len(groups))]
        for own, group in enumerate(groups)
        for each in group
    ]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the group's present options, without its parameters."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def _check_separate(parameters: Sequence[nn.Parameter]) -> None:
    """Raise OffloadConfigError if two parameters share one gradient tensor, since clipping would scale it twice."""
    seen: set[int] = set()
    for grad in [each.grad for each in parameters if each.grad is not None]:
        if grad._cdata in seen:
            raise OffloadConfigError(
                f"one tensor of shape {tuple(grad.shape)} is the gradient of several parameters, and clipping "
                "would scale it once for each: give every parameter a copy of its own (grad.clone())"
            )
        seen.add(grad._cdata)
