"""A tied weight stays one parameter for the script, and each of its blocks has a part of the gradient of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.partition import describe

torch.set_num_threads(1)
WORDS, WIDTH = 7, 4


class Tied(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.emb(words))))
        return out


class Thrice(Tied):
    """A third place, in a block that uses the weight by itself."""

    class Scores(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.weight)

    def __init__(self) -> None:
        super().__init__()
        self.scores = self.Scores(self.emb.weight)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.emb(words)))
        out: Tensor = self.head(x) + self.scores(x).sin()
        return out


class TwiceInOne(Tied):
    """The head is entered twice, and has the weight under two names."""

    class Both(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.a, self.b = (nn.Linear(WIDTH, WORDS, bias=False) for _ in range(2))
            self.a.weight = self.b.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.b(x).sin()
            return out

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Both(self.emb.weight)  # type: ignore[assignment]

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.emb(words)))
        out: Tensor = self.head(x) + self.head(2 * x)
        return out


class Normed(Tied):
    """The tied weight is the direction of a normalised one, which a hook computes before each forward of the head."""

    def __init__(self, norm: Callable[..., Any] = weight_norm) -> None:
        super().__init__()
        self.other = norm(nn.Linear(WIDTH, WIDTH))
        self.head = norm(nn.Linear(WIDTH, WIDTH))
        if norm is weight_norm:
            self.head.weight_v = self.other.weight_v
        else:
            self.head.parametrizations.weight.original1 = self.other.parametrizations.weight.original1

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.other(torch.tanh(self.emb(words))))
        return out


class Parametrized(Normed):
    """As `Normed`, in torch's newer form."""

    def __init__(self) -> None:
        super().__init__(parametrizations.weight_norm)


class Checkpointed(Tied):
    """The head is computed again in the backward."""

    reentrant = False

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.emb(words)))
        out: Tensor = checkpoint(self.head, x, use_reentrant=self.reentrant)
        return out


class Reentrant(Checkpointed):
    """As `Checkpointed`, by a backward in the backward."""

    reentrant = True


ALL = (Tied, Thrice, TwiceInOne, Normed, Parametrized, Checkpointed, Reentrant)


def _made(kind: type[Tied]) -> Tied:
    torch.manual_seed(0)
    return kind()


def _state(model: nn.Module, *, apart: bool = False, blocks: tuple[str, ...] | None = None) -> ModelState:
    layout = describe(model, torch.optim.SGD(model.parameters()), blocks)
    return ModelState(model, layout, lambda numel, dtype: torch.zeros(numel, dtype=dtype), apart=apart)


def _loss(model: nn.Module, seed: int = 0) -> Tensor:
    words = torch.randint(WORDS, (6,), generator=torch.Generator().manual_seed(seed))
    out: Tensor = model(words)
    return out.square().mean()


def _step(state: ModelState, slot: GradientSlot, loss: Callable[[], Tensor]) -> list[int]:
    """One armed backward; the blocks in the order of their reports."""
    reports: list[int] = []
    value = loss()
    state.attach(slot)
    state.arm(lambda block, _: reports.append(block))
    value.backward()  # type: ignore[no-untyped-call]
    state.finish()
    state.detach()
    return reports


def _tied_sum(state: ModelState, slot: GradientSlot) -> Tensor:
    tied = next(shard for shard in state.layout.shards if len(shard.lanes) > 1)
    parameter = state.layout.parameters[state.layout.pieces[tied.index][0].parameter]
    total = sum(slot.lane(tied, lane) for lane in range(len(tied.lanes)))
    assert isinstance(total, Tensor)
    return total[: parameter.numel].view(parameter.shape)


def _lanes(state: ModelState, slot: GradientSlot) -> list[float]:
    tied = next(shard for shard in state.layout.shards if len(shard.lanes) > 1)
    return [float(slot.lane(tied, lane).abs().sum()) for lane in range(len(tied.lanes))]


def _weight(model: Tied) -> nn.Parameter:
    names = ("head.weight_v", "head.parametrizations.weight.original1", "emb.weight")
    found = dict(model.named_parameters())
    return next(found[name] for name in names if name in found)


@pytest.mark.parametrize("kind", ALL)
def test_the_script_sees_what_plain_torch_shows(kind: type[Tied]) -> None:
    model, plain = _made(kind), _made(kind)
    before = dict(model.named_parameters(remove_duplicate=False))
    _state(model)
    _loss(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    now = dict(model.named_parameters(remove_duplicate=False))
    assert all(now[name] is before[name] for name in before) and list(now) == list(before)


def test_an_average_pairs_it_by_position() -> None:
    model, plain = _made(Tied), _made(Tied)
    _state(model)
    averaged = torch.optim.swa_utils.AveragedModel(plain)
    averaged.update_parameters(model)
    assert all(torch.equal(a, b) for a, b in zip(averaged.module.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ALL)
def test_each_block_has_its_part_and_the_sum_is_plain_torchs(kind: type[Tied]) -> None:
    model, plain = _made(kind), _made(kind)
    state = _state(model)
    slot = state.new_slot()
    for seed in range(3):
        _step(state, slot, lambda seed=seed: _loss(model, seed))  # type: ignore[misc]
        _loss(plain, seed).backward()  # type: ignore[no-untyped-call]
    assert all(each > 0 for each in _lanes(state, slot))
    torch.testing.assert_close(_tied_sum(state, slot), _weight(plain).grad)


def test_a_block_that_uses_it_reports_once_and_when_its_part_is_final() -> None:
    model = _made(TwiceInOne)
    state = _state(model)
    orders = [_step(state, state.new_slot(), lambda: _loss(model)) for _ in range(2)]
    head, body, emb = (state.layout.blocks.index(name) for name in ("head", "body", "emb"))
    assert orders[1] == [head, body, emb]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("after", [False, True])
def test_a_hook_on_the_weight_is_called_once_with_the_sum(kind: type[Tied], *, after: bool) -> None:
    model, plain = _made(kind), _made(kind)
    calls: list[int] = []

    def sign(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient.sign()  # of the sum, which is not the sum of signs

    state = None if after else _state(model)
    for each in (model, plain):
        _weight(each).register_hook(sign)
    state = state or _state(model)
    slot = state.new_slot()
    _step(state, slot, lambda: _loss(model))
    expected = len(calls)
    _loss(plain).backward()  # type: ignore[no-untyped-call]
    if kind is not Reentrant:  # whose inner backward calls it once more, as in plain torch
        assert (expected, len(calls)) == (1, 2)
    assert torch.equal(_tied_sum(state, slot), _weight(plain).grad)  # type: ignore[arg-type]


def test_a_hook_that_comes_between_forward_and_backward_or_goes_counts_from_then_on() -> None:
    model = _made(Tied)
    state = _state(model)
    slot, seen = state.new_slot(), list[Tensor]()
    loss = _loss(model)
    handle = model.emb.weight.register_hook(seen.append)
    _step(state, slot, lambda: loss)
    assert len(seen) == 1 and _lanes(state, slot)[1] == 0
    handle.remove()
    slot = state.new_slot()
    _step(state, slot, lambda: _loss(model))
    assert len(seen) == 1 and _lanes(state, slot)[1] > 0


def test_a_hook_behind_the_accumulation_is_called_once_with_the_sum() -> None:
    model, plain = _made(Tied), _made(Tied)
    state, seen = _state(model), list[Tensor]()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    _step(state, state.new_slot(), lambda: _loss(model))
    _loss(plain).backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1 and torch.equal(seen[0], plain.emb.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["emb", "head"])
def test_freezing_it_by_one_of_its_names_freezes_it(way: str) -> None:
    model = _made(Tied)
    state = _state(model)
    model.get_submodule(way).requires_grad_(False)
    slot = state.new_slot()
    _step(state, slot, lambda: _loss(model))
    touched = state.layout.touched_parameters(slot.touched)
    assert [state.layout.parameters[each].name for each in sorted(touched)] == ["body.weight", "body.bias"]
    model.get_submodule(way).requires_grad_(True)
    _step(state, slot, lambda: _loss(model))
    assert slot.touched == set(slot.views)


def test_a_penalty_over_all_parameters_counts_it_once() -> None:
    model, plain = _made(Tied), _made(Tied)
    state = _state(model)
    slot = state.new_slot()

    def loss(of: nn.Module) -> Tensor:
        return 0.0 * _loss(of) + torch.stack([p.square().sum() for p in of.parameters()]).sum()

    _step(state, slot, lambda: loss(model))
    loss(plain).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(_tied_sum(state, slot), plain.emb.weight.grad)


def test_gradients_that_the_script_takes_itself_are_those_of_plain_torch() -> None:
    model, plain = _made(Tied), _made(Tied)
    _state(model)
    mine, theirs = (torch.autograd.grad(_loss(each), each.emb.weight)[0] for each in (model, plain))
    assert torch.equal(mine, theirs)
    for each in (model, plain):
        _loss(each).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)  # type: ignore[arg-type]


def test_transforms_of_torch_func_find_the_weight() -> None:
    model, plain = _made(Tied), _made(Tied)
    _state(model)
    words = torch.arange(6).view(2, 3)

    def loss(of: nn.Module, parameters: dict[str, Tensor], each: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(of, parameters, (each,))
        return out.square().mean()

    def gradients(of: nn.Module) -> dict[str, Tensor]:
        each = torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(None, None, 0))
        return each(of, {name: p.detach() for name, p in of.named_parameters()}, words)  # type: ignore[no-any-return]

    mine, theirs = gradients(model), gradients(plain)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert torch.equal(torch.func.vmap(model)(words), torch.func.vmap(plain)(words))
    assert torch.equal(model(words), plain(words))


def test_a_forward_that_fails_leaves_the_weight_in_its_places() -> None:
    model = _made(Tied)
    state = _state(model)
    with pytest.raises(RuntimeError):
        model.head(torch.ones(1, WIDTH + 1))
    assert model.head.weight is model.emb.weight

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.head.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        _loss(model)
    handle.remove()
    _step(state, state.new_slot(), lambda: model.body(torch.ones(1, WIDTH)).sum())
    assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("post", [False, True])
def test_in_a_pipeline_a_hook_on_it_is_refused(*, post: bool) -> None:
    model = _made(Tied)
    state = _state(model, apart=True)
    slot = state.new_slot()
    slot.begin_run(range(3))
    register: Any = model.head.weight.register_hook
    if post:
        register = model.head.weight.register_post_accumulate_grad_hook
    register(lambda _: None)
    sentence = "'emb.weight' has a hook, and --stages may put its blocks 'emb', 'head' on different members"
    with pytest.raises(ConfigError, match=sentence):
        state.attach(slot)
    other = _made(Tied)
    other.emb.weight.register_hook(lambda _: None)
    with pytest.raises(ConfigError, match=sentence):
        _state(other, apart=True)


def test_in_a_pipeline_a_block_alone_has_its_part_with_equal_bits() -> None:
    plain, model = _made(Tied), _made(Tied)
    whole, state = _state(plain), _state(model, apart=True)
    expected = whole.new_slot()
    _step(whole, expected, lambda: _loss(plain))
    state.hold([2])
    for shard in state.layout.shards:
        if state.has(shard):
            state.take_parameters(shard.index, whole.parameters_of(shard))
    x = torch.tanh(plain.body(plain.emb(torch.randint(WORDS, (6,), generator=torch.Generator().manual_seed(0)))))
    slot = state.new_slot()
    slot.begin_run([2])
    loss = model.head(x.detach()).square().mean()
    state.attach(slot)
    state.arm(lambda *_: None, [2])
    loss.backward()
    state.finish()
    assert slot.digest(2) == expected.digest(2)


@pytest.mark.slow
def test_a_compiled_head_has_its_part() -> None:
    model, plain = _made(Tied), _made(Tied)
    state = _state(model)
    model.head.compile(backend="eager")
    slot, expected = state.new_slot(), (other := _state(plain)).new_slot()
    for seed in range(2):
        _step(state, slot, lambda seed=seed: _loss(model, seed))  # type: ignore[misc]
        _step(other, expected, lambda seed=seed: _loss(plain, seed))  # type: ignore[misc]
    assert slot.digests() == expected.digests()
