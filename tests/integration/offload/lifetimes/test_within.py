"""Training within a limit: parameters and optimizer states after five steps are bit for bit those of plain training."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.offload.drives.device import Device
from elastrain.offload.errors import (
    LimitTooSmallError,
    OffloadConfigError,
    PieceLostError,
    SpillReadError,
    SpillWriteError,
)
from elastrain.offload.lifetimes.pieces.cuda import host_tier
from elastrain.offload.lifetimes.within import TrainingWithin, within
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from experiments.offload.models import KINDS, build
from tests.integration.offload.lifetimes.touching import SHAPE, tokens
from tests.support.faulty_engines import EngineFaults, FaultyEngine
from tests.support.memory_engine import MemoryEngine

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 5
Loss = Callable[[nn.Module, int], Tensor]


def loss_of(model: nn.Module, step: int) -> Tensor:
    found: Tensor = model(tokens(step))
    return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and all states of the optimizer."""
    states = [optimizer.state[each] for each in model.parameters() if each in optimizer.state]
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [each.detach().clone() for each in itertools.chain(model.parameters(), values)]


def plain(model: nn.Module, loss: Loss = loss_of, *, backwards: int = 1, norm: float | None = 1.0) -> list[Tensor]:
    optimizer = adamw(model)
    torch.manual_seed(7)
    for step in range(STEPS):
        for part in range(backwards):
            loss(model, step * backwards + part).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


def limit_of(model: nn.Module, part: float) -> int:
    """A part of what the model, its gradients and AdamW's states take, and a little for whole pages."""
    return int(part * 4 * sum(each.nbytes for each in model.parameters())) + (256 << 10)


def limited(
    model: nn.Module,
    folder: Path,
    loss: Loss = loss_of,
    *,
    part: float = 0.25,
    backwards: int = 1,
    norm: float | None = 1.0,
    order: UpdateOrder | None = None,
    policy: Policy | None = None,
) -> list[Tensor]:
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_of(model, part), policy=policy)
    torch.manual_seed(7)
    for step in range(STEPS):
        for part_ in range(backwards):
            loss(model, step * backwards + part_).backward()
        if order is not None:
            training._planning.order = order
        training.step(max_grad_norm=norm)
    with training.whole():
        found = snapshot(model, optimizer)
    training.close()
    return found


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("part", [0.75, 0.5, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_plain_training(kind: str, part: float, tmp_path: Path) -> None:
    assert_same(limited(build(kind, SHAPE)[0], tmp_path, part=part), plain(build(kind, SHAPE)[0]))


@pytest.mark.parametrize("order", UpdateOrder)
def test_neither_order_of_updates_shows_in_a_bit(order: UpdateOrder, tmp_path: Path) -> None:
    assert_same(limited(build("gpt", SHAPE)[0], tmp_path, order=order), plain(build("gpt", SHAPE)[0]))


def test_gradients_of_several_backwards_are_added(tmp_path: Path) -> None:
    ours = limited(build("gpt", SHAPE)[0], tmp_path, backwards=3)
    assert_same(ours, plain(build("gpt", SHAPE)[0], backwards=3))


def test_without_clipping(tmp_path: Path) -> None:
    assert_same(limited(build("t5", SHAPE)[0], tmp_path, norm=None), plain(build("t5", SHAPE)[0], norm=None))


class MixedBlocks(nn.Module):
    """Parameters of several dtypes in turns, as where norms stay in full precision."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
            x = (torch.fft.fft(x).abs() if x.is_complex() else x).float().tanh()
        return x.square().mean()


FULL, HALF, DOUBLE, COMPLEX = torch.float32, torch.bfloat16, torch.float64, torch.complex64


# So many that another order of the sum shows in its bits.
@pytest.mark.parametrize("dtypes", [[HALF, FULL, FULL] * 6, [COMPLEX, FULL, FULL] * 6, [DOUBLE, FULL] * 10])
def test_the_norm_of_gradients_of_several_dtypes(dtypes: list[torch.dtype], tmp_path: Path) -> None:
    """torch adds up those of one dtype after those of another, in an order of its own."""

    def model() -> nn.Module:
        return MixedBlocks(dtypes)

    def loss(model: nn.Module, step: int) -> Tensor:
        found: Tensor = 1e3 * model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step)))
        return found

    assert_same(limited(model(), tmp_path, loss, part=0.6), plain(model(), loss))


def test_sparse_gradients_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(512, 64, sparse=True), nn.Linear(64, 8))
    training = within(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dirs=[str(tmp_path)], memory_limit=limit_of(model, 1)
    )
    with pytest.raises(OffloadConfigError, match=r"^0 makes sparse gradients.*: use sparse=False$"):
        model(torch.arange(8)).sum().backward()
    training.abandon()


def test_half_precision_under_autocast(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step)

    assert_same(limited(build("gpt", SHAPE)[0], tmp_path, loss), plain(build("gpt", SHAPE)[0], loss))


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again(reentrant: bool, tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        def run(block: nn.Module, *inputs: Tensor) -> Tensor:
            found: Tensor = checkpoint(block, *inputs, use_reentrant=reentrant)
            return found

        found: Tensor = model(tokens(step), run)
        return found

    assert_same(limited(build("gpt", SHAPE)[0], tmp_path, loss), plain(build("gpt", SHAPE)[0], loss))


class Tied(nn.Module):
    """The head has the embedding's weights; it uses them by the function, not by a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(64, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_tied_weights(tmp_path: Path) -> None:
    assert_same(limited(Tied(), tmp_path, part=0.6), plain(Tied()))


def test_frozen_parameters(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model, _ = build("gpt", SHAPE)
        model.decoder[1].requires_grad_(False)
        return model

    assert_same(limited(frozen(), tmp_path), plain(frozen()))


def test_two_forwards_before_two_backwards(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return loss_of(model, step) + loss_of(model, step + 100)

    assert_same(limited(build("gpt", SHAPE)[0], tmp_path, loss), plain(build("gpt", SHAPE)[0], loss))


@pytest.mark.parametrize("order", UpdateOrder)
def test_a_scheduler_changes_the_next_update_and_none_that_is_due(order: UpdateOrder, tmp_path: Path) -> None:
    def trained(training_of: Callable[[nn.Module, torch.optim.Optimizer], TrainingWithin | None]) -> list[Tensor]:
        model, _ = build("gpt", SHAPE)
        optimizer = adamw(model)
        training, scheduler = training_of(model, optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            loss_of(model, step).backward()
            if training is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                training._planning.order = order
                training.step()
            scheduler.step()
        if training is None:
            return snapshot(model, optimizer)
        with training.whole():
            found = snapshot(model, optimizer)
        training.close()
        return found

    def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingWithin:
        return within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25))

    assert_same(trained(ours), trained(lambda _model, _optimizer: None))


def test_a_gradient_penalty_differentiates_twice(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        first = loss_of(model, step)
        (slope,) = torch.autograd.grad(first, [model.embed.weight], create_graph=True)
        return first + slope.square().sum()

    # The graph of the first backward keeps all parameters in memory for the second.
    assert_same(limited(Tied(), tmp_path, loss, part=0.8), plain(Tied(), loss))


def test_an_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.no_grad():
            loss_of(model, 1000 + step)
        return loss_of(model, step)

    assert_same(limited(build("gpt", SHAPE)[0], tmp_path, loss), plain(build("gpt", SHAPE)[0]))


def test_a_plan_is_made_and_followed_within_the_limit(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25))
    most = 0
    for step in range(STEPS):
        loss_of(model, step).backward()
        training.step(max_grad_norm=1.0)
        most = max(most, training._custody.account.most_bytes)
    assert "gaps are used" in training.reason
    assert most <= limit_of(model, 0.25)
    training.close()


def test_parameters_can_be_read_and_written_while_they_are_whole(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25))
    loss_of(model, 0).backward()
    training.step()
    with training.whole():
        saved = copy.deepcopy(model.state_dict())
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    loss_of(model, 1).backward()
    training.step()
    with training.whole():
        model.load_state_dict(saved)
    with training.whole():
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    training.close()
    loss_of(model, 2).backward()


def test_large_pieces_are_striped_over_drives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("elastrain.offload.planning.io_schedule.STRIPE_S", 0.0)
    model, _ = build("gpt", SHAPE)
    optimizer, devices = adamw(model), [Device(MemoryEngine()), Device(MemoryEngine())]
    limit_bytes = limit_of(model, 0.25)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_bytes, engines=devices)
    striped = 0
    for step in range(STEPS):
        loss_of(model, step).backward()
        training.step(max_grad_norm=1.0)
        striped = max(striped, sum(len(piece.parts) > 1 for piece in training._states.pieces.values()))
    assert striped
    with training.whole():
        assert_same(snapshot(model, optimizer), plain(build("gpt", SHAPE)[0]))
    training.close()


def test_a_bounded_share_of_host_memory_is_a_tier(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    optimizer, host = adamw(model), host_tier(1 << 20)
    engines = [Device(MemoryEngine()), host]
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25), engines=engines)
    for step in range(STEPS):
        loss_of(model, step).backward()
        training.step(max_grad_norm=1.0)
    assert host.writes.moved_bytes > 0 and host.used_bytes <= 1 << 20
    with training.whole():
        assert_same(snapshot(model, optimizer), plain(build("gpt", SHAPE)[0]))
    training.close()


# What cannot work is refused; what is lost is said.


def train(model: nn.Module, training: TrainingWithin) -> None:
    for step in range(STEPS):
        loss_of(model, step).backward()
        training.step()


def test_what_cannot_be_cut_or_updated_in_parts_is_refused_by_name(tmp_path: Path) -> None:
    single = nn.Linear(4, 4)
    with pytest.raises(OffloadConfigError, match="Linear cannot be cut into blocks"):
        within(single, adamw(single), dirs=[str(tmp_path)], memory_limit=1 << 30)
    model, _ = build("gpt", SHAPE)
    with pytest.raises(OffloadConfigError, match="LBFGS is not known"):
        within(model, torch.optim.LBFGS(model.parameters()), dirs=[str(tmp_path)], memory_limit=1 << 30)
    with pytest.raises(OffloadConfigError, match="not the model's"):
        within(model, adamw(single), dirs=[str(tmp_path)], memory_limit=1 << 30)


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    with pytest.raises(LimitTooSmallError, match=r"at least \d+ bytes, which decoder\.0 with its gradients needs"):
        within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=100 << 10)


def test_a_limit_below_what_a_point_needs_is_refused_with_the_point(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=810 << 10)
    with pytest.raises(LimitTooSmallError, match=r"smallest that works .* which .* of decoder\.0.* needs"):
        train(model, training)
    training.abandon()


def test_parameters_that_are_replaced_are_refused_by_their_block(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=64 << 20)
    model.decoder[1].up.weight.data = torch.zeros_like(model.decoder[1].up.weight)
    with pytest.raises(OffloadConfigError, match=r"a parameter of decoder\.1 was replaced after `within`"):
        loss_of(model, 0)
    training.abandon()


def test_the_smallest_limit_that_is_told_works(tmp_path: Path) -> None:
    """From far below: each sentence says more, and what the last one says is enough."""
    limit_bytes, told = 1 << 10, list[int]()
    for _ in range(16):
        model, _ = build("gpt", SHAPE)
        try:
            training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_bytes)
            train(model, training)
        except LimitTooSmallError as error:
            told.append(limit_bytes := error.smallest_bytes)
            continue
        training.close()
        break
    else:
        pytest.fail(f"none of these works: {told}")
    assert told == sorted(told)


def test_parameters_that_are_new_are_refused_by_their_names(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=64 << 20)
    model.decoder[1].up.weight = nn.Parameter(torch.zeros(256, 64))
    with pytest.raises(OffloadConfigError, match=r"decoder\.1\.up\.weight became a parameter of the model after"):
        loss_of(model, 0)
    training.abandon()


def test_a_model_that_was_converted_is_refused(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=64 << 20)
    model.to(torch.float64)
    with pytest.raises(OffloadConfigError, match=r"replaced after `within` was called \(by \.to\(\)"):
        loss_of(model, 0)
    training.abandon()


class OneBlock(nn.Module):
    """One block that is used three times, as in ALBERT: its name is all that tells it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, block = nn.Embedding(256, 64), nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.layers = nn.ModuleList([block, block, block])
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_a_block_that_is_used_several_times(tmp_path: Path) -> None:
    assert_same(limited(OneBlock(), tmp_path, part=0.6), plain(OneBlock()))


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_that_is_none_is_refused(limit_bytes: int, tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    with pytest.raises(LimitTooSmallError, match=f"memory_limit={limit_bytes} bytes is too small"):
        within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_bytes)


def test_drives_that_are_none_are_refused(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    with pytest.raises(OffloadConfigError, match="there is no drive"):
        within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=64 << 20, engines=[])
    with pytest.raises(OffloadConfigError, match="is not a directory"):
        within(model, adamw(model), dirs=[str(tmp_path / "none")], memory_limit=64 << 20)
    with pytest.raises(OffloadConfigError, match="which is memory itself"):
        within(model, adamw(model), dirs=["/dev/shm"], memory_limit=64 << 20)


def test_no_drive_is_refused() -> None:
    model, _ = build("gpt", SHAPE)
    with pytest.raises(OffloadConfigError, match="dirs is empty"):
        within(model, adamw(model), dirs=[], memory_limit=64 << 20)


@pytest.mark.parametrize("faults", [EngineFaults(read_fails_after=6), EngineFaults(flips_after=6)])
def test_state_that_does_not_come_back_ends_training_with_one_sentence(faults: EngineFaults, tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    engine = FaultyEngine(MemoryEngine(), faults)
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25), engines=[engine])
    with pytest.raises(
        (PieceLostError, SpillReadError), match=r"start from a checkpoint|compute the micro-batch again"
    ):
        train(model, training)


@pytest.mark.parametrize(
    "faults", [EngineFaults(write_fails_after=6), EngineFaults(vanishes_after=12), EngineFaults(full_after=0)]
)
@pytest.mark.parametrize("order", UpdateOrder)
def test_a_drive_that_stops_ends_training_with_a_named_error(
    faults: EngineFaults, order: UpdateOrder, tmp_path: Path
) -> None:
    model, _ = build("gpt", SHAPE)
    engine = FaultyEngine(MemoryEngine(), faults)

    def run() -> None:
        training = within(
            model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25), engines=[engine]
        )
        training._planning.order = order
        train(model, training)

    with pytest.raises((PieceLostError, SpillReadError, SpillWriteError), match="injected fault"):
        run()


def test_a_full_drive_is_said(tmp_path: Path) -> None:
    model, _ = build("gpt", SHAPE)
    engine = FaultyEngine(MemoryEngine(), EngineFaults(full_after=6))
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.25), engines=[engine])
    with pytest.raises(SpillWriteError, match="full"):
        train(model, training)
    training.abandon()


def test_blocks_that_are_compiled(tmp_path: Path) -> None:
    """Parameters move around compiled blocks by the same hooks; what the programs save leaves as the plan says."""
    from elastrain.offload.compiling.backend import elastrain

    def compiled(backend: object, **more: object) -> nn.Module:
        torch._dynamo.reset()
        model = build("gpt", SHAPE)[0]
        for number in (0, 2):
            model.decoder[number] = torch.compile(model.decoder[number], backend=backend, fullgraph=True, **more)  # type: ignore[call-overload]
        return model

    expected = plain(compiled("aot_eager"))
    ours = compiled(elastrain, options={"backend": "aot_eager", "min_bytes": 4096})
    assert_same(limited(ours, tmp_path, part=0.5), expected)
