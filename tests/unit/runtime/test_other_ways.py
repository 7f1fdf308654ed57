"""A forward that takes another way in some micro-batches than in the tracing pass: the bits of one, or a sentence.

Which way it takes depends on the batch, which every member has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.naming import is_fake
from elastrain.pipeline.stubs.passes import StubPass
from tests.support.pipeline_models import Case, Dropped, Layer, Stack
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines

TRACED_IS_ODD = False
"""Whether the sum of the first micro-batch's tokens is."""


class _Turning(Stack):
    """Four layers, and what it does with them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.between(self.embed(tokens), bool(tokens.sum() % 2), int(tokens.sum()) % 3)
        logits: Tensor = self.head(x)
        return logits

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        raise NotImplementedError


class DroppedAgain(_Turning):
    """One layer is left out; all are computed again in the backward, with several micro-batches in flight."""

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place != 1 or not is_odd:
                x = checkpoint(layer, x, use_reentrant=False)
        return x


class Ordered(_Turning):
    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        for place in (0, 1, 2, 3) if is_odd else (0, 2, 1, 3):
            x = self.layers[place](x)
        return x


class LeftEarly(_Turning):
    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return x if is_odd else self.layers[3](self.layers[2](x))  # type: ignore[no-any-return]  # torch: a module


class EnteredLater(_Turning):
    """Layers that the tracing pass does not enter, and one that it does and others do not; `x` is of code between."""

    def __init__(self, *, if_odd: tuple[int, ...], if_even: tuple[int, ...]) -> None:
        super().__init__()
        self.if_odd, self.if_even = if_odd, if_even

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        x = x * 2.0
        for place in self.if_odd if is_odd else self.if_even:
            x = self.layers[place](x)
        return x


class Refined(_Turning):
    """The first of two entries of a layer is left out, or comes in besides: what the other takes moves."""

    def __init__(self, *, if_odd: bool) -> None:
        super().__init__()
        self.if_odd = if_odd

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        a = self.layers[0](x)
        b = self.layers[1](a)
        early = self.layers[2](a) if is_odd is self.if_odd else 0.0
        return self.layers[3](self.layers[2](b) + early)  # type: ignore[no-any-return]  # torch: a module


class Repeated(_Turning):
    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        x = self.layers[0](x)
        for _ in range(1 + third):
            x = self.layers[1](x)
        return self.layers[3](self.layers[2](x))  # type: ignore[no-any-return]  # torch: a module


class Joining(Layer):
    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        made: Tensor = super().forward(x)
        return made if beside is None else made + 0.5 * beside


class Joined(_Turning):
    """Two layers take a tensor that code between blocks has made; in some micro-batches the first takes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joining(24) for _ in range(4))

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        a = self.layers[0](x) * 0.5
        b = self.layers[1](a) * 0.5
        x = self.layers[2](a if is_odd is TRACED_IS_ODD else b)
        return self.layers[3](x, a)  # type: ignore[no-any-return]  # torch: a module


class ChangedBehind(_Turning):
    """In some micro-batches code changes what one layer has taken before the next takes it."""

    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        a = self.layers[1](self.layers[0](x)).detach()
        b = self.layers[2](a)
        if is_odd:
            a.mul_(0.5)
        return self.layers[3](b)  # type: ignore[no-any-return]  # torch: a module


class AddedBehind(_Turning):
    def between(self, x: Tensor, is_odd: bool, third: int) -> Tensor:
        a = self.layers[1](self.layers[0](x))
        b = self.layers[2](a)
        return self.layers[3](b + a if is_odd else b)  # type: ignore[no-any-return]  # torch: a module


def _in_pipeline(build: Any, cuts: tuple[int, ...]) -> Any:
    members = ("a", "b", "c")[: len(cuts) + 1]
    return in_pipelines(Case(build, (3, 4)), chain(members, cuts, MICRO_BATCHES), members, 1).found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "cuts"),
    [
        pytest.param(Dropped, (2,), id="the first one behind the cut is left out"),
        pytest.param(Dropped, (3,), id="the last one before the cut is left out"),
        pytest.param(DroppedAgain, (2, 3), id="left out, computed again"),
        pytest.param(Ordered, (4,), id="in another order"),
        pytest.param(LeftEarly, (3, 5), id="left early"),
        pytest.param(lambda: Refined(if_odd=TRACED_IS_ODD), (3,), id="entered twice, or once"),
        pytest.param(Repeated, (3,), id="entered one to three times"),
        pytest.param(
            lambda: EnteredLater(if_odd=(0, 1, 2, 3), if_even=(1, 2, 3)),
            (1, 3),
            id="not in the tracing pass, the first",
        ),
        pytest.param(
            lambda: EnteredLater(if_odd=(0, 1, 2, 3), if_even=(0, 3)), (1, 2), id="not in the tracing pass, two of them"
        ),
        pytest.param(
            lambda: EnteredLater(if_odd=(0, 1, 3), if_even=(0, 2, 3)), (2, 3), id="one in the place of its neighbour"
        ),
        pytest.param(
            lambda: EnteredLater(if_odd=(0, 1, 2, 3), if_even=(0, 1)), (2, 3), id="not in the tracing pass, the last"
        ),
        pytest.param(
            lambda: EnteredLater(if_odd=(1, 2, 3), if_even=(0, 1, 2, 3)),
            (1, 3),
            id="the first one behind code left out",
        ),
        pytest.param(
            lambda: EnteredLater(if_odd=(0,), if_even=(0, 1, 2, 3)), (3, 4), id="one after the other, over both cuts"
        ),
    ],
)
def test_another_way_makes_the_bits_of_one_where_tensors_can_be_told(build: Any, cuts: tuple[int, ...]) -> None:
    assert _in_pipeline(build, cuts) == alone(Case(build, (3, 4)), 1).found


@pytest.mark.parametrize(
    ("build", "cuts", "sentence"),
    [
        pytest.param(
            Joined, (3, 4), "block 'layers.3' takes another tensor than in the tracing pass", id="another one"
        ),
        pytest.param(
            lambda: Refined(if_odd=not TRACED_IS_ODD),
            (3,),
            "block 'layers.2' takes another tensor than in the tracing pass",
            id="entered once, or twice",
        ),
        pytest.param(ChangedBehind, (3,), "behind block 'layers.2', what that block has taken", id="changed"),
        pytest.param(AddedBehind, (3,), "block 'layers.3' takes a tensor that it did not take", id="added"),
    ],
)
def test_another_way_is_refused_where_they_cannot(build: Any, cuts: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _in_pipeline(build, cuts)


def test_where_the_maker_does_not_look_at_who_takes_what_tensors_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken: what takes a number first is sent under it, whatever else takes it."""

    def collect(passed: StubPass, tensor: Tensor, numbers: Sequence[int], at: tuple[int, int], block: str) -> None:
        for each in passed._numbers(tensor, numbers, passed._collected):
            found = passed.give(tensor, [each], at) if is_fake(tensor) else tensor
            if found is not None and passed._collected[each] is None:
                passed._collected[each] = (found, found._version, block)

    monkeypatch.setattr(StubPass, "collect", collect)
    assert _in_pipeline(Joined, (3, 4)) != alone(Case(Joined, (3, 4)), 1).found
