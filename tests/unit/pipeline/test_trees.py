"""Dataclasses are nodes of trees: what is taken apart is put together again, and what cannot be stays whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from elastrain.pipeline.stubs.naming import flatten, leaves_of, mapped


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    parts: list[Any] = field(default_factory=list)
    shared: ClassVar[int] = 7


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


@dataclass(slots=True)
class SlottedMore(Slotted):
    more: Any = None


@dataclass
class Asking:
    """Its `__init__` takes something else than its fields."""

    hidden: Tensor = field(init=False)
    beside: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        raise AssertionError("it is not made anew")


@dataclass
class Fielded(dict[str, Any]):
    hidden: Any = None


@dataclass(eq=False)
class Module(nn.Module):
    width: int

    def __post_init__(self) -> None:
        super().__init__()


def _asking(hidden: Tensor) -> Asking:
    asking = object.__new__(Asking)
    asking.hidden, asking.beside = hidden, 3
    asking.later = hidden + 1  # type: ignore[attr-defined]  # as scripts do
    return asking


X = torch.arange(3.0)


@pytest.mark.parametrize(
    ("thing", "tensors", "shown"),
    [
        (
            Frozen(X, [X, {"a": X}, Slotted(X)]),
            4,
            lambda t: (t.hidden, *t.parts[:1], t.parts[1]["a"], t.parts[2].hidden),
        ),
        (SlottedMore(X, (X, None)), 2, lambda t: (t.hidden, t.more[0])),
        (_asking(X), 2, lambda t: (t.hidden, t.later)),
    ],
    ids=["frozen, nested", "inherited slots", "another init"],
)
def test_a_dataclass_is_taken_apart_and_put_together(thing: Any, tensors: int, shown: Any) -> None:
    leaves, spec = flatten([thing, 5])
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == tensors
    made, five = tree_unflatten(leaves, spec)
    assert (type(made), five) == (type(thing), 5) and made is not thing
    assert all(a is b for a, b in zip(shown(made), shown(thing), strict=True))
    doubled = mapped(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, thing)
    assert all(torch.equal(a, b * 2) for a, b in zip(shown(doubled), shown(thing), strict=True))


def test_trees_of_the_same_form_are_equal_whatever_lies_in_them() -> None:
    assert flatten(Frozen(X))[1] == flatten(Frozen(X + 1))[1] != flatten(Slotted(X))[1]


@pytest.mark.parametrize("thing", [Fielded(X), Module(3), Frozen, Frozen.__dataclass_fields__["hidden"]])
def test_what_is_no_plain_dataclass_stays_whole(thing: Any) -> None:
    assert leaves_of([thing])[0] is thing
