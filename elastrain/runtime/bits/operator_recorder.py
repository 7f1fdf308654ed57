"""A record of every operator that a micro-batch calls: its module, and digests of its arguments and of its result."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastrain.integrity.bit_traces import LOOP, MODEL, OperatorCall
from elastrain.pipeline.stubs.naming import plain_name
from elastrain.runtime.model.watched import sums_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_FILLS = {True: (0.5, -3.0), False: (0, 1)}
"""Is floating -> what memory holds that was not written to, in one process and in another."""


class OperatorRecorder(TorchDispatchMode):
    """A mode that records operator calls. Results of `torch.empty` are filled, and not recorded."""

    def __init__(self, model: nn.Module, fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[OperatorCall] = []
        self.root = MODEL
        self._fill = fill
        self._names = {module: plain_name(path) or MODEL for path, module in model.named_modules()}
        self._entered: list[str] = []
        self._going_back = LOOP
        """The module whose backward is running."""
        self._hooks: list[Any] = []

    def __enter__(self) -> OperatorRecorder:
        self._hooks = [
            of_modules.register_module_forward_pre_hook(self._enter),
            of_modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator and record it."""
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(("aten.empty", "aten.new_empty")):
            return self._filled(func(*args, **kwargs))
        inputs, draws, module = digest_of((args, kwargs)), _draws(func, args, kwargs), self.place()
        output = func(*args, **kwargs)
        told = digest_of(output)
        self.events.append(
            OperatorCall(module=module, what=name, way=self._way(), output=told, inputs=inputs, draws=draws)
        )
        return output

    def note(self, module: str, what: str, value: Any) -> int:
        """Record a value that is no operator's result, and return its digest."""
        told = digest_of(value)
        self.events.append(OperatorCall(module=module, what=what, way=self._way(), output=told))
        return told

    def place(self) -> str:
        """Return the name of the module that is being computed."""
        if self._entered:
            return self._entered[-1]
        return self._going_back if _is_backward() else LOOP

    def name_of(self, module: nn.Module) -> str:
        """Return the module's name in the model, or that of its class."""
        return self._names.get(module, type(module).__name__)

    def _way(self) -> str:
        return "forward" if not _is_backward() else "recomputed" if self._entered else "backward"

    def _filled(self, made: Any) -> Any:
        if isinstance(made, Tensor) and not made.is_meta and not made.is_quantized:
            made.fill_(_FILLS[made.is_floating_point() or made.is_complex()][self._fill])
        return made

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        outer = self.place()
        self._entered.append(self.name_of(module))
        for tensor in _tensors(inputs):
            self._mark(tensor, "input", outer)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self.name_of(module)
        while self._entered and self._entered.pop() != name:  # a forward that an exception has left
            pass
        for tensor in _tensors(output):
            self._mark(tensor, "output", name)

    def _mark(self, tensor: Tensor, kind: str, module: str) -> None:
        """Note, for the backward, which module made the tensor, or whose code passed it on to another one."""
        if not tensor.requires_grad:
            return
        marks: dict[str, str] | None = getattr(tensor, "_elastrain_marks", None)
        if marks is None:
            tensor._elastrain_marks = marks = {}  # type: ignore[attr-defined]
            tensor.register_hook(lambda gradient: self._came_back(marks))  # type: ignore[no-untyped-call]
        marks.setdefault(kind, module)

    def _came_back(self, marks: Mapping[str, str]) -> None:
        self._going_back = marks.get("output") or marks["input"]


def digest_of(value: Any) -> int:
    """Return a digest of all tensors and plain values in a nested value. Other objects count by their types."""
    leaves = list(_leaves(value))
    tensors = [each for each in leaves if isinstance(each, Tensor)]
    rest = [None if isinstance(each, Tensor) else each if isinstance(each, _PLAIN) else type(each) for each in leaves]
    return zlib.crc32(repr((sums_of(tensors), rest)).encode())


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_leaves(value):
        yield from _leaves(dict(leaf)) if isinstance(leaf, Mapping) else (leaf,)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _draws(func: Any, args: Any, kwargs: Any) -> str:
    generators = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    if any(each.device.type == "cpu" and each is not torch.default_generator for each in generators):
        return "own"
    return "default" if torch.Tag.nondeterministic_seeded in func.tags else ""


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
