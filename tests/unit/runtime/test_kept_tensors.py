"""Blocks that build a tensor in their first forward and keep it: it has no values where that ran on fakes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.module_state import KeptByModules
from tests.support.pipeline_models import Case, Layer, Stack
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines

SLOW = pytest.mark.slow

_GLOBAL: dict[int, Tensor] = {}


def _mask(length: int) -> Tensor:
    return torch.tril(torch.ones(length, length))


@functools.lru_cache(maxsize=4)
def _remembered(length: int) -> Tensor:
    return _mask(length)


@functools.cache
def _remembered_pair(length: int) -> tuple[Tensor, float]:
    return _mask(length), 0.5


class Keeping(Layer):
    def __init__(self, how: str) -> None:
        super().__init__(24)
        self.how = how
        self.kept: Tensor | None = None
        self.is_built = False
        self.by_length: dict[int, tuple[Tensor]] = {}
        self.all: list[Tensor] = []

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(torch.einsum("ij,bjd->bid", self._mask(x.shape[1]), x))

    def _mask(self, length: int) -> Tensor:
        if self.how == "a function":
            return _remembered(length)
        if self.how == "a function's pair":
            return _remembered_pair(length)[0]
        if self.how == "a method":
            return self._remembered(length)
        if self.how == "a dict":
            return self.by_length.setdefault(length, (_mask(length),))[0]
        if self.how == "a global":
            return _GLOBAL.setdefault(length, _mask(length))
        if not self.is_built:
            self.is_built, made = True, _mask(length)
            if self.how == "a buffer":
                self.register_buffer("kept", made)
            elif self.how == "a list":
                self.all.append(made)
            else:
                self.kept = made
        found = self.all[0] if self.how == "a list" else self.kept
        assert found is not None
        return found

    @functools.lru_cache(maxsize=8)  # noqa: B019  # as some models do
    def _remembered(self, length: int) -> Tensor:
        return _mask(length)


class Keepers(Stack):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping(how) for _ in range(4))
        if how == "a buffer":
            for each in self.layers:
                del each.kept


def _compare(build: Callable[[], nn.Module]) -> None:
    case = Case(build, (3, 4))
    found: Any = in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1).found
    assert found == alone(case, 1).found


@pytest.mark.parametrize(
    "how",
    [
        "an attribute",
        "a function's pair",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("a buffer", "a list", "a dict", "a function", "a method")
        ),
    ],
)
def test_what_a_block_keeps_from_its_first_forward_is_made_anew_behind_the_tracing_pass(how: str) -> None:
    _remembered.cache_clear()
    _remembered_pair.cache_clear()
    _compare(lambda: Keepers(how))


def test_what_nobody_finds_ends_with_a_sentence_that_names_the_block() -> None:
    _GLOBAL.clear()
    with pytest.raises(
        ConfigError, match=r"block 'layers.0' returns a tensor without values, made with one that it ke"
    ):
        _compare(lambda: Keepers("a global"))


def test_caches_of_modules_are_looked_for_again_where_a_name_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 names are not looked through for each block: an owner is, when it has more or fewer of them."""
    module = ModuleType("made_here")
    monkeypatch.setitem(sys.modules, "made_here", module)
    model = nn.Linear(2, 2)
    for size in (3, 4):  # first a cache that has only just come, then one that is known
        kept = KeptByModules(model)
        if size == 3:
            module.late = functools.lru_cache(torch.zeros)  # type: ignore[attr-defined]
        with FakeTensorMode():
            module.late(size)
        kept.give_back()
        assert module.late.cache_info().currsize == 0
        module.late(3)
    kept = KeptByModules(model)
    module.late(3)
    kept.give_back()
    assert module.late.cache_info().currsize == 1
