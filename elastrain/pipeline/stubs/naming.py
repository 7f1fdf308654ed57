"""The choice of a model's blocks, by a rule or by the user's patterns, and trees of arguments and results.

Names are those of the model without `torch.compile`, whose wrappers add a part to each name below them.

Trees are those of `torch.utils._pytree`, with dataclasses as additional nodes. Dataclass types themselves are not
registered with torch: that is left to the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten

from elastrain.errors import ConfigError

_WRAPPED = "_orig_mod"
"""The name of the module in a wrapper that `torch.compile` returns."""
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def plain_name(name: str) -> str:
    """Return the name of a module, parameter or buffer as it is without wrappers of `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module in a wrapper of `torch.compile`, and other modules as they are."""
    # By name, because an import of torch's compiler costs a second.
    while type(module).__name__ == "OptimizedModule":
        module = module.get_submodule(_WRAPPED)
    return module


def module_of(model: nn.Module, name: str) -> nn.Module:
    """Return the submodule with this plain name: the wrapper if it is compiled, because hooks run before that."""
    module = model
    for part in filter(None, name.split(".")):
        module = uncompiled(module).get_submodule(part)
    return module


def blocks_of(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the names of the blocks, in the model's order.

    Without patterns, a child is opened if it contains, at any depth, a container with at least two children that own
    parameters. Children of a container are blocks and are not opened.

    Args:
        model: The user's model.
        patterns: Names of submodules; `*` stands for one part of a name.

    Raises:
        ConfigError: If a pattern matches no submodule, or if one block lies in another.
    """
    if patterns is None:
        return _distinct(model, _owners(model, ""))
    found = tuple(dict.fromkeys(name for pattern in patterns for name in _matching(model, pattern)))
    for name in found:
        inside = next((other for other in found if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ConfigError(f"block {inside!r} lies in block {name!r}: name one of them")
    return _distinct(model, found)


def _matching(model: nn.Module, pattern: str) -> list[str]:
    parts = plain_name(pattern).split(".")
    expression = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in parts))
    named = dict.fromkeys(plain_name(name) for name, module in model.named_modules() if name and _owns(module))
    found = [name for name in named if expression.fullmatch(name)]
    if not found:
        raise ConfigError(f"no submodule that owns parameters is called {pattern!r}: see named_modules()")
    return found


def _owners(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in _children(module):
        if isinstance(child, _CONTAINERS):
            yield from _in_container(child, f"{prefix}{name}.")
        elif _owns(child):
            # A wrapper around a stack of layers is opened: it would be one block of nearly the whole model.
            yield from _owners(child, f"{prefix}{name}.") if _has_stack(child) else (f"{prefix}{name}",)


def _in_container(container: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in _children(container):
        if isinstance(child, _CONTAINERS):
            yield from _in_container(child, f"{prefix}{name}.")
        elif _owns(child):
            yield f"{prefix}{name}"


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, uncompiled(child)) for name, child in uncompiled(module).named_children())


def _has_stack(module: nn.Module) -> bool:
    containers = (each for each in module.modules() if isinstance(each, _CONTAINERS))
    return any(sum(_owns(child) for child in container.children()) > 1 for container in containers)


def _owns(module: nn.Module) -> bool:
    """Return True if the module owns parameters or running statistics, which have to be folded."""
    if next(module.parameters(), None) is not None:
        return True
    return any(isinstance(each, _NormBase) and each.running_mean is not None for each in module.modules())


def _distinct(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Remove names of modules that were named before: a module registered twice is the block of its first name."""
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(id(uncompiled(module_of(model, name))), name)
    return tuple(first.values())


@dataclass(frozen=True)
class _Form:
    """The type and the field names of a dataclass, without its values."""

    kind: type
    names: tuple[str, ...]

    def made(self, values: Iterable[object]) -> object:
        """Make the object without `__init__`, which may take other arguments or compute something."""
        thing: object = object.__new__(self.kind)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(thing, name, value)
        return thing


class _Opened:
    """A dataclass instance as a node of a tree. Unflattening the tree makes an instance of its class again."""

    def __init__(self, thing: Any) -> None:
        # Slots of a base class are found among the fields only.
        names = dict.fromkeys((*getattr(thing, "__dict__", ()), *(each.name for each in fields(thing))))
        self.form = _Form(type(thing), tuple(name for name in names if hasattr(thing, name)))
        self.values = [_opened(getattr(thing, name)) for name in self.form.names]


register_pytree_node(_Opened, lambda opened: (opened.values, opened.form), lambda values, form: form.made(values))


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten a tree into leaves and its spec, with dataclasses as nodes."""
    leaves, spec = tree_flatten(tree)
    return tree_flatten(_opened(tree)) if any(map(_is_record, leaves)) else (leaves, spec)


def is_fake(leaf: object) -> TypeGuard[Tensor]:
    """Return True if the leaf is a fake tensor."""
    return isinstance(leaf, FakeTensor)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, with dataclasses as nodes."""
    return flatten(tree)[0]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of the tree in new containers, with `change` applied to each leaf."""
    leaves, spec = flatten(tree)
    return tree_unflatten(map(change, leaves), spec)


def _opened(tree: Any) -> Any:
    return tree_map(lambda leaf: _Opened(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: object) -> bool:
    """Return True for a plain dataclass.

    Others, such as a dict with fields or a module, cannot be taken apart like this.
    """
    kind = type(leaf)
    return hasattr(kind, "__dataclass_fields__") and kind.__new__ is object.__new__ and not isinstance(leaf, nn.Module)
