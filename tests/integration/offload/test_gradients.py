"""Gradients with offload equal those of keeping everything, bit for bit, for whatever a model does with autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastrain.offload import ActivationOffload, LimitTooSmallError, OffloadConfig, OffloadConfigError, save_on_disk
from elastrain.offload import Path as Way
from elastrain.offload.activations.pass_records import SpillRecord
from elastrain.offload.drives.request_queue import RequestQueue
from tests.support.faulty_engines import ThrottledEngine
from tests.support.memory_engine import MemoryEngine

MIN_BYTES = 1024
Loss = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["as much as is hidden", "a limit that bites"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationOffload]:
    limit = 384 << 10 if request.param == "a limit that bites" else None
    made = save_on_disk([tmp_path], memory_limit=limit, min_bytes=MIN_BYTES, deadline_s=20.0)
    yield made
    gc.collect()  # double backward and raised errors leave cycles of graph nodes
    made.close()
    assert made.stats().live_bytes == 0
    assert all(device.used_bytes == 0 for device in made.stats().devices)
    assert list(tmp_path.iterdir()) == []


class Attention(nn.Module):
    """Fused projection, equal-shaped slices, transposes, in-place activation, norm: what saves awkward views."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, 4, c // 4).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(x), inplace=True))


def model(depth: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*[Attention() for _ in range(depth)])


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def plain_loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).float().square().mean()


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


def run(net: nn.Module, x: Tensor, loss: Loss, offload: ActivationOffload | None) -> list[Tensor]:
    if offload is None:
        value = loss(net, x)
    else:
        with offload:
            value = loss(net, x)
    value.backward()
    return gradients(net)


def assert_same(offload: ActivationOffload, loss: Loss, net: nn.Module, x: Tensor, passes: int = 3) -> None:
    expected = run(net, x, loss, None)
    assert expected
    for _ in range(passes):
        found = run(net, x, loss, offload)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.stats().spilled_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_dtype(offload: ActivationOffload, dtype: torch.dtype) -> None:
    assert_same(offload, plain_loss, model().to(dtype), batch(dtype))


def test_autocast(offload: ActivationOffload) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain_loss(net, x)

    assert_same(offload, loss, model(), batch())


def test_activation_checkpointing(offload: ActivationOffload) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        for block in net.children():
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    assert_same(offload, loss, model(), batch())


def test_reentrant_checkpointing(offload: ActivationOffload) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in net.children():
            x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()

    assert_same(offload, loss, model(), batch())


def test_selective_checkpointing(offload: ActivationOffload) -> None:
    def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        saves = op is torch.ops.aten.native_layer_norm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        for block in net.children():
            x = checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
        return x.square().mean()

    assert_same(offload, loss, model(), batch())


def test_dropout_and_batch_norm(offload: ActivationOffload) -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = nn.Conv1d(32, 64, 3), nn.BatchNorm1d(64), nn.Conv1d(64, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(F.dropout(F.relu_(self.n(self.a(x.transpose(1, 2)))), 0.3))
            return y

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return plain_loss(net, x)

    torch.manual_seed(0)
    assert_same(offload, loss, Conv(), batch())


def test_double_backward(offload: ActivationOffload) -> None:
    def penalized(offload: ActivationOffload | None) -> list[Tensor]:
        net, x = model(2), batch().requires_grad_()
        attention = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        torch.manual_seed(3)
        for p in attention.parameters():
            nn.init.normal_(p)
        del net
        if offload is None:
            (g,) = torch.autograd.grad(attention(x).sum(), x, create_graph=True)
            g.square().sum().backward()
        else:
            with offload:
                value = attention(x).sum()
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            with offload:
                penalty = g.square().sum()
            penalty.backward()
        return gradients(attention)

    for a, b in zip(penalized(offload), penalized(None), strict=True):
        assert torch.equal(a, b)


def test_backward_twice_with_retain_graph(offload: ActivationOffload) -> None:
    net, x = model(), batch()
    plain_loss(net, x).backward()
    expected = gradients(net)
    for _ in range(2):
        with offload:
            loss = plain_loss(net, x)
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            assert all(torch.equal(a, b) for a, b in zip(gradients(net), expected, strict=True))


def test_gradient_accumulation_over_several_graphs_at_once(offload: ActivationOffload) -> None:
    net, batches = model(), [batch() * scale for scale in (1.0, 0.5, 2.0)]
    for x in batches:
        plain_loss(net, x).backward()
    expected = gradients(net)
    losses = []
    for x in batches:
        with offload:
            losses.append(plain_loss(net, x))
    for loss in losses:  # first in, first out, as a pipeline does it
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), expected, strict=True))
    del loss, losses


def test_custom_functions_with_strided_and_offset_tensors(offload: ActivationOffload) -> None:
    seen: list[tuple[Any, ...]] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            parts = (x[3:, ::2].t(), x.t()[5:], x[:, 1].expand(4, -1), x.flip(0)[1:])
            ctx.save_for_backward(*parts)
            ctx.layouts = [(p.shape, p.stride(), p.storage_offset()) for p in parts]
            return x.square()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(([(p.shape, p.stride(), p.storage_offset()) for p in ctx.saved_tensors], ctx.layouts))
            total: Tensor = sum((p.sum() for p in ctx.saved_tensors), torch.zeros(()))
            return grads[0] * total

    x = torch.randn(64, 32, requires_grad=True)
    Keep.apply((x * 2).exp()).sum().backward()  # type: ignore[no-untyped-call]
    expected, x.grad = x.grad, None
    with offload:
        loss = Keep.apply((x * 2).exp()).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]
    assert all(found == given for found, given in seen)


def test_the_whole_loop_inside_one_region(offload: ActivationOffload) -> None:
    net, x = model(), batch()
    expected = run(net, x, plain_loss, None)
    with offload:
        for _ in range(3):
            plain_loss(net, x).backward()
            assert all(torch.equal(a, b) for a, b in zip(gradients(net), expected, strict=True))
    assert offload.stats().passes >= 3


def test_a_forward_that_raises_leaves_nothing(offload: ActivationOffload) -> None:
    with pytest.raises(RuntimeError, match="shape"), offload:
        model()(batch()) @ torch.ones(7, 7)
    assert_same(offload, plain_loss, model(), batch())


def test_a_forward_without_backward_leaves_nothing(offload: ActivationOffload) -> None:
    net = model()
    with offload:
        plain_loss(net, batch())
    with offload, torch.no_grad():
        plain_loss(net, batch())
    assert_same(offload, plain_loss, net, batch())


COMPILE_IN: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "a function": lambda net: torch.compile(lambda x: net(x).exp(), backend="aot_eager"),
    "a module": lambda net: torch.compile(net, backend="aot_eager"),
    "a whole graph": lambda net: torch.compile(net, backend="aot_eager", fullgraph=True),
    "in place": lambda net: net.compile(backend="aot_eager") or net,  # type: ignore[func-returns-value]
}


# Refused before anything could leave: how much may leave makes no difference.
@pytest.mark.parametrize("offload", ["a limit that bites"], indirect=True)
@pytest.mark.parametrize("when", ["before, and it has run", "before", "inside"])
@pytest.mark.parametrize("what", COMPILE_IN)
def test_compiled_code_is_refused_in_one_sentence_and_what_is_not_compiled_still_works(
    offload: ActivationOffload, what: str, when: str
) -> None:
    net, x = model(1), batch()
    run_it = None if when == "inside" else COMPILE_IN[what](net)
    if when == "before, and it has run":
        assert run_it is not None
        run_it(x)
    with (
        pytest.raises(OffloadConfigError, match=r"torch\.compile was used inside save_on_disk \(in .*leave it out"),
        offload,
    ):
        (run_it or COMPILE_IN[what](net))(x).sum().backward()
    torch._dynamo.reset()
    assert_same(offload, plain_loss, model(), batch())


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all tests here: while a group is destroyed, its threads cannot have the interpreter's lock, which they
    need to let go of the last backward. That was long ago when the last test has ended."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_models_that_share_the_trainer_with_ddp(offload: ActivationOffload) -> None:
    assert_same(offload, plain_loss, nn.parallel.DistributedDataParallel(model()), batch())


@pytest.mark.usefixtures("group")
def test_fully_sharded_models(offload: ActivationOffload) -> None:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for block in net.children():
        fully_shard(block)
    fully_shard(net)

    def local(found: list[Tensor]) -> list[Tensor]:
        return [g.to_local() if hasattr(g, "to_local") else g for g in found]

    expected = local(run(net, batch(), plain_loss, None))
    for _ in range(2):
        found = local(run(net, batch(), plain_loss, offload))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# What is written, and what stays.


def passes(offload: ActivationOffload, net: nn.Module, x: Tensor, count: int = 1) -> None:
    for _ in range(count):
        run(net, x, plain_loss, offload)


def test_a_storage_is_written_once_however_many_views_are_saved(tmp_path: Path) -> None:
    with_views = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    x = torch.randn(64, 64, requires_grad=True)
    with with_views:
        h = x * 1.5
        q, k, v = h.chunk(4, dim=1)[0], h[:, 21:37], h.t()[42:58].t()
        loss = (q * k).sum() + (k * v).sum() + (h * h).sum()
    loss.backward()
    stats = with_views.stats()
    assert stats.saved_bytes == h.nbytes
    assert stats.shared_bytes == 5 * h.nbytes
    with_views.close()


def test_a_storage_that_is_saved_again_after_a_change_is_written_again(tmp_path: Path) -> None:
    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = x * 1.5
        unused = y.sin()  # saves y as it is now; its backward is never run
        (device,) = offload._open().devices
        device.queue.close()  # y is on disk now
        device.queue = type(device.queue)("again", threads=1)
        y.mul_(2)
        loss = y.cos().sum()
    del y, unused
    loss.backward()
    assert torch.equal(x.grad, -(x.detach() * 1.5 * 2).sin() * 2 * 1.5)  # type: ignore[arg-type]
    offload.close()


def test_parts_of_a_storage_that_change_apart_keep_their_bits(tmp_path: Path) -> None:
    """As in torch's recurrent cells: versions are equal, although one part was changed after the other was written."""
    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def all_written() -> None:
        for device in offload._open().devices:
            device.queue.close()
            device.queue = RequestQueue("again", threads=1)

    def loss(between: Callable[[], None]) -> Tensor:
        first, second = (x @ x.t()).unsafe_chunk(2, dim=1)
        opened = first.sigmoid_()
        between()
        return (opened * second.tanh_()).sum()

    expected = torch.autograd.grad(loss(lambda: None), x)[0]
    with offload:
        value = loss(all_written)
    assert torch.equal(torch.autograd.grad(value, x)[0], expected)
    offload.close()


def test_parts_that_stay_count_and_a_limit_below_them_is_refused(tmp_path: Path) -> None:
    x = torch.randn(32, 64).requires_grad_()

    def loss() -> Tensor:
        parts = [(x @ x.t()).unsafe_chunk(2, dim=1) for _ in range(8)]  # 4 KiB each, of which both halves are saved
        return torch.stack([(first.sigmoid_() * second.tanh_()).sum() for first, second in parts]).sum()

    def train(limit_bytes: int) -> ActivationOffload:
        offload = save_on_disk([tmp_path], memory_limit=limit_bytes, min_bytes=MIN_BYTES)
        with offload:
            value = loss()
        value.backward()
        return offload

    with pytest.raises(LimitTooSmallError) as refused:
        train(16 << 10).close()
    offload = train(refused.value.smallest_bytes)
    assert 8 * 4096 <= offload.stats().peak_bytes <= refused.value.smallest_bytes
    offload.close()


def test_a_slice_of_a_data_set_does_not_count(tmp_path: Path) -> None:
    data, weight = torch.randn(1 << 10, 64), nn.Parameter(torch.randn(64, 64))
    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    with offload:
        loss = F.linear(data[:32].detach(), weight).sum()
    assert offload.stats().saved_bytes == 0
    loss.backward()
    offload.close()


@pytest.mark.parametrize("limit_bytes", [None, 1 << 20])
@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_models(tmp_path: Path, cell: type[nn.RNNBase], limit_bytes: int | None) -> None:
    torch.manual_seed(0)
    offload = save_on_disk([tmp_path], memory_limit=limit_bytes, min_bytes=MIN_BYTES)
    assert_same(offload, lambda net, x: net(x)[0].square().mean(), cell(32, 64, 2), batch())
    assert offload.stats().spilled_bytes > 0
    offload.close()


@pytest.mark.parametrize("made", [nn.Parameter, Tensor.requires_grad_], ids=["parameter", "leaf"])
def test_parameters_and_their_views_are_never_written(tmp_path: Path, made: Callable[[Tensor], Tensor]) -> None:
    offload = save_on_disk([tmp_path], min_bytes=1)
    weight = made(torch.randn(32, 32))
    x = torch.ones(1, 32)
    with offload:
        loss = (x @ weight.t().contiguous().t()).sum() * 0 + F.linear(x, weight).sum() + (x @ weight.view(32, 32)).sum()
    loss.backward()
    last = offload.stats().last
    sizes = [] if last is None else [each.size_bytes for each in last.lifetimes]
    # The copy that `contiguous` makes of a transposed weight is an activation; the weight itself is none.
    assert sizes.count(weight.nbytes) <= 1
    offload.close()


def test_detached_views_of_a_models_weights_stay(tmp_path: Path) -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.detach()[:]

    offload = save_on_disk([tmp_path], min_bytes=1)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        loss = Detached()(x).sum()
    loss.backward()
    assert offload.stats().saved_bytes == 0
    offload.close()


def test_the_tail_that_backward_needs_first_stays(tmp_path: Path) -> None:
    net, x = model(6), batch()
    probe = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    passes(probe, net, x)
    saved_bytes = probe.stats().saved_bytes
    probe.close()
    offload = save_on_disk([tmp_path], memory_limit=saved_bytes // 2, min_bytes=MIN_BYTES)
    passes(offload, net, x, 3)
    last = offload.stats().last
    assert last is not None
    assert last.peak_bytes <= saved_bytes // 2
    ways = [each.path for each in last.lifetimes]
    assert ways[-1] is Way.KEPT
    first_kept = ways.index(Way.KEPT)
    assert set(ways[first_kept:]) == {Way.KEPT}
    assert 0 < first_kept < len(ways)
    offload.close()


def test_lifetimes_name_modules_and_say_when(tmp_path: Path) -> None:
    offload = save_on_disk([tmp_path], min_bytes=MIN_BYTES)
    passes(offload, model(), batch())
    last = offload.stats().last
    assert last is not None
    assert {"0.qkv (Linear)", "2.norm (LayerNorm)"} <= {each.module for each in last.lifetimes}
    for each in last.lifetimes:
        assert each.needed_s is not None
        assert 0 <= each.saved_s <= each.needed_s <= each.released_s
    assert max(live_bytes for _, live_bytes in last.timeline) == last.peak_bytes
    offload.close()


def test_several_directories_share_the_load(tmp_path: Path) -> None:
    dirs = [tmp_path / name for name in ("a", "b")]
    for each in dirs:
        each.mkdir()
    offload = save_on_disk(dirs, min_bytes=MIN_BYTES)
    assert_same(offload, plain_loss, model(6), batch())
    assert all(device.written_bytes > 0 for device in offload.stats().devices)
    offload.close()


def test_several_drives_take_shares_that_follow_their_measured_speed(tmp_path: Path) -> None:
    """Forward waits for the drives. Each storage goes where it is done first, which leans towards the faster one."""
    # Slow enough to be waited for where the machine is busy, too.
    drives = [ThrottledEngine(MemoryEngine(), bytes_per_s=rate) for rate in (40e6, 120e6)]
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=40 << 20, min_bytes=MIN_BYTES)
    offload = ActivationOffload(config, engines=drives)
    # Numbers that do not compress: where cores are idle, others would be packed and hardly written at all.
    x = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
    written: list[list[int]] = []
    for _ in range(3):
        with offload:
            y = x
            for _ in range(24):
                y = y.sin()
            loss = y.sum()
        loss.backward()
        written.append([device.written_bytes for device in offload.stats().devices])
        del y, loss
    slow, fast = (after - before for before, after in zip(written[0], written[-1], strict=True))
    assert slow > 0
    assert 2 <= fast / slow <= 9, (slow, fast)  # one is three times as fast
    offload.close()


def test_entering_twice_is_refused(tmp_path: Path) -> None:
    offload = save_on_disk([tmp_path])
    with offload, pytest.raises(ValueError, match="entered already"):
        offload.__enter__()
    offload.close()


def test_two_offloads_in_a_process_may_save_the_same_tensor(tmp_path: Path) -> None:
    first, second = (save_on_disk(tmp_path, min_bytes=MIN_BYTES) for _ in range(2))
    nets, x = (model(), model(seed=1)), batch()

    def found(around: Sequence[AbstractContextManager[Any]]) -> list[Tensor]:
        with around[0]:
            y = nets[0](x).sigmoid()
        with around[1]:
            loss = plain_loss(nets[1], y)
        loss.backward()
        return [each for net in nets for each in gradients(net)]

    expected = found([nullcontext(), nullcontext()])
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found([first, second]), expected, strict=True))
    for each in (first, second):
        each.close()
        assert each.stats().live_bytes == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dirs": ()}, "dirs is empty"),
        ({"memory_limit": 0}, "memory_limit must be a positive number of bytes, got 0"),
        ({"quota": -1}, "quota must be a positive number of bytes, got -1"),
        ({"threads_per_device": 0}, "threads_per_device must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadConfig(**{"dirs": (str(tmp_path),), **wrong})


def _records() -> list[SpillRecord]:
    return [each for each in gc.get_objects() if type(each) is SpillRecord]


def test_a_finished_pass_leaves_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    offload, net, x = save_on_disk([tmp_path], min_bytes=MIN_BYTES), model(), batch()
    passes(offload, net, x)
    gc.collect()
    gc.disable()
    try:
        others = _records()  # of earlier tests, whose threads may still be at work on a busy machine
        passes(offload, net, x, 2)
        offload.close()  # its threads have let go of what they worked on
        assert [each for each in _records() if not any(each is other for other in others)] == []
    finally:
        gc.enable()


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[ActivationOffload]:
    """Whose drive is as quick as can be: `all_written` waits for it."""
    made = save_on_disk([tmp_path], min_bytes=MIN_BYTES, deadline_s=20.0)
    yield made
    made.close()


def all_written(offload: ActivationOffload | None) -> None:
    for device in () if offload is None else offload._open().devices:
        device.queue.close()
        device.queue = RequestQueue("again", threads=1)


def test_noise_that_its_operator_fills_after_it_was_saved(offload: ActivationOffload) -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return plain_loss(net, x)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 96), nn.RReLU(), nn.Linear(96, 96), nn.RReLU(), nn.Linear(96, 8), nn.RReLU())
    assert_same(offload, loss, net, batch(), passes=8)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda h: h.data.clamp_(max=0.5),
    "numpy": lambda h: h.detach().numpy().clip(None, 0.5, out=h.detach().numpy()),
    "nothing": lambda h: None,
}


@pytest.mark.parametrize("written", [True, False], ids=["written before", "not written before"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_no_version_tells_between_two_saves(quick: ActivationOffload, change: str, written: bool) -> None:
    def gradient(offload: ActivationOffload | None) -> Tensor:
        w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        with offload or nullcontext():
            h = (x @ w).exp()
            y = h.sigmoid()  # the operator that saved h has returned: h may be written
            if written:
                all_written(offload)
            CHANGES[change](h)
            loss = (h @ w).square().mean() + y.mean()
        del h, y
        all_written(offload)
        return torch.autograd.grad(loss, w)[0]

    expected = gradient(None)
    for _ in range(3):
        assert torch.equal(gradient(quick), expected)
    assert quick.stats().spilled_bytes > 0


def test_a_change_while_it_is_written(tmp_path: Path) -> None:
    """Only one save: the copy would hold neither what was there nor what is there."""
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    held: list[Tensor] = []

    class Interrupted(MemoryEngine):
        def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
            super().write(offset_bytes, views)
            if held:
                held.pop().data.mul_(2)

    def gradient(offload: ActivationOffload | None) -> Tensor:
        with offload or nullcontext():
            h = w.exp()
            held.append(h)
            loss = h.cos().sum() * 0 + h.sum()  # the drive takes h while cos is computed
            if offload is None:
                held.pop().data.mul_(2)
            else:
                all_written(offload)
        del h
        return torch.autograd.grad(loss, w)[0]

    expected = gradient(None)
    config = OffloadConfig(dirs=(str(tmp_path),), min_bytes=MIN_BYTES)
    offload = ActivationOffload(config, engines=[Interrupted()])
    assert torch.equal(gradient(offload), expected)
    offload.close()
