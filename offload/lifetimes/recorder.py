"""A recorder of one step of any model, by a dispatch mode: storages with their uses, and operators with their seconds.

It sees operators below autograd, also those of the backward pass. Operators that only make another view of memory are
no uses. Storages are told apart by their addresses while they live, and none is kept alive. Seconds are those of
`clock`; for an asynchronous device the clock has to wait for the device (`CudaMeter.clock`).
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.step_recording import RecordedOperator, RecordedStorage, Recording

# Arguments that these operators change without declaring it.
UNDECLARED = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device})
_NONE: dict[int, torch.UntypedStorage] = {}


@dataclass(kw_only=True, eq=False)
class _Life:
    """The known facts about one storage so far."""

    size_bytes: int
    born: int | None
    watched: weakref.ref[torch.UntypedStorage]
    name: str = ""
    kind: Kind | None = None
    died: int | None = None
    uses: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)


class StepRecorder(TorchDispatchMode):
    """A context manager around one step.

    Operators are recorded with the `scope` of that moment, which may be set anytime. `model` and `optimizer` show which
    tensors are parameters, gradients and states. Use one recorder per step, in one thread.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = ""
        self._model = model
        self._optimizer = optimizer
        self._clock = clock
        self._operators: list[tuple[Any, str, bool, float]] = []  # the fields of each `RecordedOperator`
        self._living: dict[int, _Life] = {}
        self._lives: list[_Life] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> StepRecorder:
        for name, parameter in self._model.named_parameters():
            self._declare(parameter, Kind.PARAMETER, name)
            if parameter.requires_grad:
                self._watch_gradient(name, parameter)
        self._declare_states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._declare_states()

    def recording(self) -> Recording:
        """Return the recorded step."""
        operators = tuple(
            RecordedOperator(name=str(func), scope=scope, backward=backward, seconds=seconds)
            for func, scope, backward, seconds in self._operators
        )
        return Recording(operators=operators, storages=tuple(self._as_value(life) for life in self._lives))

    def _watch_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            self._declare(parameter.grad, Kind.GRADIENT, name)

        def landed(leaf: torch.Tensor) -> None:
            if leaf.grad is not None:
                self._declare(leaf.grad, Kind.GRADIENT, name)

        hook = parameter.register_post_accumulate_grad_hook(landed)  # type: ignore[no-untyped-call]
        self._hooks.append(hook)

    def _declare_states(self) -> None:
        names: dict[torch.Tensor, str] = {each: name for name, each in self._model.named_parameters()}
        for parameter, state in (self._optimizer.state if self._optimizer is not None else {}).items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._declare(value, Kind.STATE, f"{names.get(parameter, 'a parameter')}: {key}")

    def _declare(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """Give a storage a kind and a name. The first call for a storage counts, so tied weights have one name."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return  # a sparse tensor or a wrapper has no plain memory
        storage = tensor.untyped_storage()
        life = self._life(storage, storage._cdata)
        if life.kind is None:
            life.kind, life.name = kind, name

    def _as_value(self, life: _Life) -> RecordedStorage:
        return RecordedStorage(
            name=life.name,
            kind=life.kind or self._unnamed_kind(life),
            size_bytes=life.size_bytes,
            born=life.born,
            died=life.died,
            uses=tuple(life.uses),
            changes=tuple(life.changes),
        )

    def _unnamed_kind(self, life: _Life) -> Kind:
        """Return ACTIVATION for a storage that existed before a backward that uses it, else TEMPORARY."""
        before = life.born is None or not self._is_backward(life.born)
        return Kind.ACTIVATION if before and any(map(self._is_backward, life.uses)) else Kind.TEMPORARY

    def _is_backward(self, number: int) -> bool:
        return self._operators[number][2]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        began_s = self._clock()
        result = func(*args, **kwargs)
        seconds = self._clock() - began_s
        # This runs for each operator, and most are small, so values are made only at the end.
        number, made = len(self._operators), _storages((result,))
        taken = _storages(args)
        if kwargs:
            _collect(kwargs.values(), taken)
        written = _written(func)
        changed = _changed(written, args, kwargs) if written else _NONE
        self._operators.append((func, self.scope, torch._C._current_graph_task_id() != -1, seconds))
        fresh = [key for key in made if key not in taken]
        if fresh or changed or not made:
            for key, storage in taken.items():
                life = self._life(storage, key)
                life.uses.append(number)
                if key in changed:
                    life.changes.append(number)
            for key in fresh:
                life = self._life(made[key], key, born=number)
                life.uses.append(number)
                life.changes.append(number)
        return result

    def _life(self, storage: torch.UntypedStorage, key: int, born: int | None = None) -> _Life:
        life = self._living.get(key)
        if life is not None and life.watched() is not None:
            life.size_bytes = max(life.size_bytes, storage.nbytes())
            return life
        found: list[_Life] = []

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            found[0].died = len(self._operators)

        life = _Life(size_bytes=storage.nbytes(), born=born, watched=weakref.ref(storage, gone))
        found.append(life)
        self._living[key] = life
        self._lives.append(life)
        return life


def _storages(values: Iterable[Any]) -> dict[int, torch.UntypedStorage]:
    """Return all storages in arguments or results, by identity, also those in lists, tuples or dicts."""
    found: dict[int, torch.UntypedStorage] = {}
    _collect(values, found)
    return found


def _collect(values: Iterable[Any], found: dict[int, torch.UntypedStorage]) -> None:
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if value.layout is torch.strided:
                storage = value.untyped_storage()
                found[storage._cdata] = storage
        elif kind not in _ATOMS and isinstance(value, list | tuple | dict):
            _collect(value.values() if isinstance(value, dict) else value, found)


def _changed(
    written: tuple[tuple[int, str], ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the arguments that an operator changes."""
    return _storages([args[position] if position < len(args) else kwargs.get(name) for position, name in written])


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that an operator changes, by its schema or by `UNDECLARED`."""
    undeclared = UNDECLARED.get(func._schema.name, ())
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
    )
