"""A record of everything that a loop may change in a model's modules, such as plain attributes, and of its changes.

`layers` decides who made a change.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs.naming import plain_name
from elastrain.runtime.model.statistics import buffers_of, tracking
from elastrain.snapshot.digest import checksum, digests

_KINDS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_HOOKS = tuple(f"{of}{kind}" for of in ("", "_global") for kind in _KINDS)
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_LOOKED_INTO = 64  # items; a longer list or dict is compared by its length only
# Not watched: attributes that every module has (but `training`), and forwards, which pipelines and compilers replace.
_OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"} | {"forward", "_compiled_call_impl"}
MISSING = object()
"""Marker for the value of an attribute that does not exist."""


class PlainAttributes:
    """The attributes, submodules, configuration fields, buffers, requires_grad and hooks of a model, and their changes.

    Running statistics are not watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self._statistics = {
            plain_name(name) for path, module in tracking(model) for name, _ in buffers_of(path, module)
        }
        self._sums: dict[str, tuple[Any, int]] = {}
        self._model = model
        # Of a wrapper of torch.compile and its module, which have one name, the module has the attributes.
        self.modules = {plain_name(path): module for path, module in model.named_modules()}
        self.parameters = {f"{plain_name(name)}.requires_grad": q for name, q in model.named_parameters()}
        self._hooked: dict[str, object] = {f"hooks of {p or 'the model'!r}": each for p, each in model.named_modules()}
        self._hooked |= {f"hooks of parameter {name!r}": each for name, each in model.named_parameters()}
        self._hooked["hooks of all modules"] = torch.nn.modules.module
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._sizes: list[int] = []
        self.rebase()
        self._first = [name for name in self._places if _has_to_begin_alike(self.modules, name)]

    def digest(self) -> str:
        """Return a digest of the values that must be equal on all members at the start.

        These are `training`, `requires_grad`, plain attributes of torch's own layers, and floats of other modules.
        """
        values = [value if type(value := self.get(name)) in _PLAIN else ... for name in self._first]
        values += [q.requires_grad for q in self.parameters.values()]
        told = self._first, [name.removesuffix(".requires_grad") for name in self.parameters], values
        return blake2b(repr(told).encode(), digest_size=6).hexdigest()

    def get(self, name: str) -> Any:
        """Return an attribute's value, or MISSING."""
        of, attribute = self._places[name]
        return of.get(attribute, MISSING)

    def put(self, name: str, value: Any) -> Any:
        """Set an attribute, also one that this member's script has not set yet. Returns the value that is there now."""
        path, _, attribute = name.rpartition(".")
        mine = self.get(name) if name in self._places else MISSING
        if name in self.parameters:
            self.parameters[name].requires_grad_(value)
        elif (
            isinstance(mine, Tensor)
            and isinstance(value, Tensor)
            and mine.dtype is value.dtype
            and mine.shape == value.shape
        ):
            mine.data.copy_(value)
            return mine
        else:
            place: tuple[Any, str] = self._places.get(name) or (vars(self.modules[path]), attribute)
            if isinstance(value, Tensor):  # a checkpoint gives it in host memory
                like = mine if isinstance(mine, Tensor) else next(self._model.parameters(), value)
                is_buffer = place[0] is not vars(self.modules[path])
                value = value.to(like.device if is_buffer or like is mine else value.device, copy=True)
            place[0][place[1]] = value
        return value

    def hooks(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each object that may have hooks, and its number of hooks."""
        for name, hooked in self._hooked.items():
            yield name, sum(len(getattr(hooked, kind, None) or ()) for kind in _HOOKS)

    def persistent(self) -> Iterator[str]:
        """Yield the name of each persistent buffer."""
        for path, module in self.modules.items():
            for attribute in module._buffers.keys() - module._non_persistent_buffers_set:
                if (name := f"{path}.{attribute}" if path else attribute) not in self._statistics:
                    yield name

    def rebase(self) -> None:
        """Take the present values as the base of the next comparison."""
        self._before = self._look(is_thorough=True) | dict(self.hooks())

    def changed(self, *, is_thorough: bool = False, has_hooks: bool = True) -> list[tuple[str, Any, Any]]:
        """Return name, value and former value of all changes since the last call. Values not plain are tokens.

        Args:
            is_thorough: Read persistent buffers completely, because a write through `.data` leaves no other trace.
            has_hooks: Count hooks, too. That takes as long as all the rest.
        """
        with torch._C.DisableTorchFunction():  # else a tracing pass would note these reads as uses of the tensors
            before, now = self._before, self._look(is_thorough=is_thorough)
            now |= self.hooks() if has_hooks else ((name, before[name]) for name in self._hooked)
        self._before = now
        pairs = ((name, value, before.get(name, MISSING)) for name, value in now.items()) if now != before else ()
        return [(name, value, was) for name, value, was in pairs if value is not was and value != was]

    def _look(self, *, is_thorough: bool) -> dict[str, Any]:
        sizes = [len(vars(each)) + len(each._buffers) + len(each._modules) for each in self.modules.values()]
        if sizes != self._sizes:
            self._sizes = sizes
            self._places |= {n: at for n, at in _attributes(self.modules) if n not in self._statistics}
        found = {
            name: value if type(value := of.get(attribute, MISSING)) in _PLAIN else token_of(value)
            for name, (of, attribute) in self._places.items()
        }
        found.update(self._sums_of_persistent(found, is_thorough=is_thorough))
        found.update((name, q.requires_grad) for name, q in self.parameters.items())
        return found

    def _sums_of_persistent(self, tokens: Mapping[str, Any], *, is_thorough: bool) -> dict[str, int]:
        """Return the checksum of each persistent buffer. Without `is_thorough`, only new tokens show changes."""
        names = list(self.persistent())
        due = [name for name in names if is_thorough or self._sums.get(name, (None, 0))[0] != tokens[name]]
        sums = sums_of([self.get(name) for name in due])
        self._sums.update((name, (tokens[name], total)) for name, total in zip(due, sums, strict=True))
        return {name: self._sums[name][1] for name in names}


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yield name and place (dict and key) of each attribute, submodule, buffer and configuration field."""
    known: set[int] = set()
    for path, module in modules.items():
        dot, is_torchs = f"{path}." if path else "", type(module).__module__.startswith("torch.nn.")
        for of in (module._buffers, module._modules):
            yield from ((f"{dot}{name}", (of, name)) for name in of)
        for name, value in vars(module).items():
            if name not in _OF_ALL_MODULES and not (is_torchs and name.startswith("_")):
                yield f"{dot}{name}", (vars(module), name)
            if _is_configuration(value) and id(value) not in known:
                known.add(id(value))
                yield from ((f"{dot}{name}.{key}", (vars(value), key)) for key in vars(value))


def _is_configuration(value: object) -> bool:
    is_one = is_dataclass(value) or isinstance(value, SimpleNamespace | Namespace) or "Config" in type(value).__name__
    return is_one and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)


def sums_of(values: Sequence[Tensor | None]) -> list[int]:
    """Return checksums of bits, dtype and shape, 0 for tensors that are not dense. Waits for a device at most once."""
    plain = [None if value is None or not _is_dense(value) else _contiguous(value) for value in values]
    far = [each for each in plain if each is not None and each.device.type != "cpu"]
    of_far = iter(digests(far))
    return [
        0 if each is None else (checksum(each) if each.device.type == "cpu" else next(of_far)) ^ _kind_of(each)
        for each in plain
    ]


def _is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _contiguous(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().resolve_neg().contiguous()


def _kind_of(value: Tensor) -> int:
    return crc32(f"{value.dtype}{tuple(value.shape)}".encode())


def token_of(value: Any, depth: int = 3) -> Any:
    """Return a token that differs if the value was changed or replaced. The token keeps no tensor alive."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return "tensor", id(value), 0 if value.is_inference() else value._version
    if type(value) in _CONTAINERS and len(value) <= _LOOKED_INTO and depth:
        # Pairs of `items()` are made anew for each look, so that their ids would tell nothing.
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return type(value), [token_of(each, depth - 1) for each in items]
    return type(value), id(value), len(value) if type(value) in _CONTAINERS else 0


def _has_to_begin_alike(modules: Mapping[str, nn.Module], name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    module = modules.get(path)
    if module is None or attribute.startswith("_") or type(vars(module).get(attribute, ...)) not in _PLAIN:
        return False
    torchs_own = type(module).__module__.startswith("torch.nn.")
    return torchs_own or attribute == "training" or type(vars(module)[attribute]) is float
