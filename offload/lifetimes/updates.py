"""Clipping and the optimizer's step, block by block: at once after the backward, or each before its next forward."""

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
    """`due` blocks have gradients that wait for their update. Norms are taken as gradients land.

    `shows_gradients`: hooks are to see the used ones of this step before they are forgotten.
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
        # By block, and then by the optimizer's groups; with the states of when the step was closed.
        self._due_in: dict[int, list[dict[nn.Parameter, dict[str, Any] | None]]] = {}
        self._others: dict[int, list[nn.Parameter]] = {}  # by block: who has gradients and no update
        self._updated: dict[int, tuple[list[nn.Parameter], bool]] = {}  # by block; whether others keep gradients
        self._options: list[dict[str, Any]] = []

    def hooks(self, when: str) -> list[Callable[..., Any]]:
        """Return what others have registered to be called before ("pre") or after ("post") the optimizer's step."""
        own = getattr(self._optimizer, f"_optimizer_step_{when}_hooks").values()
        all_ = getattr(torch_optimizer, f"_global_optimizer_{when}_hooks").values()
        return [each for each in (*all_, *own) if each != self.refuse_foreign_step]

    def run_hooks(self, when: str) -> None:
        """Call them as `optimizer.step()` does, once for the whole step."""
        for each in self.hooks(when):
            each(self._optimizer, (self._optimizer,), {})

    def landed(self, parameter: nn.Parameter) -> None:
        """A gradient is complete, or as far as this backward goes."""
        gradient = parameter.grad
        assert gradient is not None
        # As `clip_grad_norm_` takes it: on CUDA the operator for many tensors has other bits than that for one.
        norm = torch._foreach_norm([gradient])[0] if gradient.is_cuda else torch.linalg.vector_norm(gradient)
        self._norms[parameter], self._versions[parameter] = norm, gradient._version

    def close_step(
        self, order: list[nn.Parameter], max_grad_norm: float | None, *, only_finite: bool
    ) -> torch.Tensor | None:
        """Let all blocks with gradients be due, clipped by the norm of all; returns that norm.

        With `only_finite`, a norm that is infinite or no number has gradients forgotten, and nothing is due. The norm
        is computed as `torch.nn.utils.clip_grad_norm_` does. As with `optimizer.zero_grad()`, parameters that the
        optimizer does not have keep their gradients, and the next backward adds to them.
        """
        if max_grad_norm is not None:
            _check_separate(order)
        for block in list(self.due):  # what no forward has used since the last step
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
        # A scheduler may change them before a block is updated.
        self._options = [_options_of(group) for group in self._optimizer.param_groups]
        for parameter in self._close(scale):
            parameter.grad = None
        # Whenever they are updated: a graph from before the step is refused, and one from after it is not.
        increment_version([each for groups in self._due_in.values() for group in groups for each in group])
        return total

    def _scale_all(self, scale: torch.Tensor) -> None:
        """Clip all gradients at once, since hooks may look at them before the first update."""
        for block in sorted({self._states.block_of[each] for each in self._norms}):
            held = self._states.of(Kind.GRADIENT, [block])
            self._custody.acquire(held)
            self._custody.change(held)
            for each in self._norms:
                if self._states.block_of[each] == block and each.grad is not None:
                    each.grad.mul_(scale)
            self._custody.release()

    def _as_torch_adds_them(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Norms of gradients of one dtype after those of another, in torch's own order of dtypes."""
        if not parameters:
            return []  # torch refuses to group nothing
        # Sizes and dtypes alone are looked at: the gradients themselves may be out of memory.
        grouped = _group_tensors_by_device_and_dtype([[each.grad for each in parameters]], with_indices=True)
        return [self._norms[parameters[number]] for _, numbers in grouped.values() for number in numbers]

    def _close(self, scale: torch.Tensor | None) -> set[nn.Parameter]:
        """Note what is due, and return the optimizer's parameters, as they are now.

        Who is frozen, thawed or given to the optimizer from now on is updated as if that was done at once.
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
        """Let the optimizer's parameters have no gradients: nobody is updated."""
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
        """Between backward and step the program may have changed, replaced, forgotten, exchanged or made gradients."""
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
        """Raise OffloadConfigError, since the optimizer's own `step` was called."""
        raise OffloadConfigError(
            "optimizer.step() was called for a model in offload.within: call step(max_grad_norm=…) of what within "
            "returned; it clips, updates and forgets the gradients"
        )

    def update(self, block: int) -> None:
        """One block's update, if it is due."""
        if block not in self.due:
            return
        kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.STATE)
        held = [piece for kind in kinds for piece in self._states.of(kind, [block])]
        self._conductor.arrive(StepStage.UPDATE, block, held)
        self._custody.change(held)
        scale = self.due.pop(block)  # from here on nothing is refused
        groups = self._due_in.pop(block)
        parameters = [each for group in groups for each in group]
        given = [(each, each.grad) for each in parameters]  # since the step, for the next one
        for parameter in parameters:
            parameter.grad = self._states.gradient(parameter)
        others = [each for each in self._others.pop(block) if self._states.is_ours(each)]
        for parameter in (*parameters, *others):
            if scale is not None and parameter.grad is not None:
                parameter.grad.mul_(scale)
        # New states come one parameter at a time: all of a block's would be in memory twice.
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
        """Forget gradients that were used, but for those that the optimizer has no parameters of."""
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
        """With the states of when the step was closed: who forgets or replaces them later does so after the update."""
        states, now = self._optimizer.state, {each: self._optimizer.state.get(each) for each in former}
        _put(states, {each: state for each, state in former.items() if state is not now[each]})
        yield
        _put(states, {each: state for each, state in now.items() if state is not former[each]})

    def _step(self, parameters: Sequence[Iterable[nn.Parameter]]) -> None:
        """Let the optimizer see these alone, by its groups, with the options that its step was closed with."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            with ExitStack() as stack:
                # Versions told of the update when the step was closed.
                stack.enter_context(_unsafe_preserve_version_counter(tuple(chain.from_iterable(parameters))))
                for group, options, wanted in zip(groups, self._options, parameters, strict=False):
                    parts = stack.enter_context(cut(list(wanted), self._optimizer.state, options))
                    group.update(options, params=parts)
                for group in groups[len(parameters) :]:  # added since then
                    group.update(params=[])
                step: Callable[..., Any] = type(self._optimizer).step
                getattr(step, "__wrapped__", step)(self._optimizer)  # without hooks: `step` runs them once for all
                vars(self._optimizer)["_opt_called"] = True  # schedulers ask for it
        finally:
            for group, before in zip(groups, now, strict=True):
                group.update(before)


def _put(states: dict[torch.Tensor, Any], found: Mapping[nn.Parameter, Any]) -> None:
    """Let parameters have these states, or none."""
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
    """All but the parameters, as they are now."""
    options = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def _check_separate(parameters: Sequence[nn.Parameter]) -> None:
    """Raise OffloadConfigError for one tensor as the gradient of two parameters: clipping would scale it twice."""
    seen: set[int] = set()
    for grad in [each.grad for each in parameters if each.grad is not None]:
        if grad._cdata in seen:
            raise OffloadConfigError(
                f"one tensor of shape {tuple(grad.shape)} is the gradient of several parameters, and clipping "
                "would scale it once for each: give every parameter a copy of its own (grad.clone())"
            )
        seen.add(grad._cdata)
