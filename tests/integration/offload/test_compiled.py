"""`torch.compile(backend="elastrain")`: the gradients of the same program without offload, from less memory."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from elastrain.offload import ActivationOffload, save_on_disk
from elastrain.offload.compiling.backend import elastrain
from experiments.offload.models import Attention, Shape, build
from tests.support.sources import ROOT

MIN_BYTES = 4096
Call = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()


@pytest.fixture
def limit_bytes() -> int:
    return 384 << 10


@pytest.fixture
def offload(limit_bytes: int, tmp_path: Path) -> Iterator[ActivationOffload]:
    made = save_on_disk([tmp_path], memory_limit=limit_bytes, min_bytes=MIN_BYTES, deadline_s=60.0)
    yield made
    made.close()
    assert made.stats().live_bytes == 0
    assert all(device.used_bytes == 0 for device in made.stats().devices)
    assert list(tmp_path.iterdir()) == []


def inside(loss: Call) -> Call:
    """Compiled when it is first called."""

    def run(x: Tensor) -> Tensor:
        return ours(loss)(x)

    return run


def ours(call: Any, below: str = "aot_eager", **more: Any) -> Call:
    compiled: Call = torch.compile(
        call, backend=elastrain, options={"backend": below, "min_bytes": MIN_BYTES}, fullgraph=True, **more
    )
    return compiled


def gradients(
    run: Call, net: nn.Module, inputs: Sequence[Tensor], offload: ActivationOffload | None, *, autocast: bool = False
) -> list[Tensor]:
    net.zero_grad()
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    torch.manual_seed(3)
    with offload or nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = run(*leaves)
    loss.backward()
    found = [each.grad for each in (*net.parameters(), *leaves) if each.grad is not None]
    return [each.clone() for each in found]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("limit_bytes", [3 << 20])
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_models_have_the_same_bits_in_one_graph(kind: str, offload: ActivationOffload) -> None:
    net, tokens = build(kind, Shape(width=128, layers=2, tokens=64, batch=4))
    expected = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), net, [tokens], None)
    counters.clear()
    run = ours(net)
    for _ in range(4):
        assert_same(gradients(run, net, [tokens], offload), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    stats = offload.stats()
    assert stats.last is not None
    assert stats.last.saved_bytes > 2 << 20
    assert stats.spilled_bytes > 1 << 20


@pytest.mark.timeout(1200)  # a loaded machine takes its time
@inductor_config.patch(compile_threads=1)  # more are processes that import torch again
def test_inductor_in_half_precision(tmp_path: Path) -> None:
    """Where a value is rounded must not change: what lies in memory, and what stays in registers, is as without us."""
    # Half a layer: each kernel more costs the compiler of C++ two seconds, twice.
    net = Attention(Shape(width=128, layers=1, tokens=64, batch=8), causal=True)
    x = torch.randn(8, 64, 128)

    def loss(x: Tensor) -> Tensor:
        return (x + F.gelu(net(x.tanh()))).square().mean()

    expected = gradients(torch.compile(loss, fullgraph=True), net, [x], None, autocast=True)
    offload = save_on_disk([tmp_path], memory_limit=1 << 20, min_bytes=MIN_BYTES)
    run = ours(loss, "inductor")
    for _ in range(3):
        assert_same(gradients(run, net, [x], offload, autocast=True), expected)
    assert offload.stats().spilled_bytes > 1 << 20
    offload.close()


def test_a_program_keeps_everything_where_nobody_takes_it() -> None:
    net, tokens = build("gpt", Shape(width=64, layers=2, tokens=64, batch=4))
    expected = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), net, [tokens], None)
    assert_same(gradients(ours(net), net, [tokens], None), expected)


# What was wrong in eager mode, or might be: compiled before the `with`, and inside.


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x.exp(), training=True).square()


class Views(nn.Module):
    """Several views of one value are saved, and a part of another."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x * 1.5).sin()
        q, k, v = h.chunk(4, dim=1)[0], h[:, 16:32], h.t()[32:48].t()
        return (q * k).exp() + (k * v) * h.view(-1)[: k.numel()].view_as(k) + (h.T @ h)[:64, :16]


class InPlace(nn.Module):
    """An input, and a value of which a copy is saved, are changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        h = x * 2
        y = h.exp()
        h.mul_(3)
        z = (y * h).tanh_()
        w = h.clone()
        w[:8] = z[:8]
        x.mul_(2)
        return w * z * x


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x @ x.t() / 64).softmax(-1) @ x.relu()
        return x


CASES: dict[str, type[nn.Module]] = {"filled late": Noisy, "views": Views, "in place": InPlace, "used twice": Twice}


@pytest.mark.parametrize("when", ["before", "before, and it has run", "inside"])
@pytest.mark.parametrize("case", CASES)
def test_awkward_programs(case: str, when: str, offload: ActivationOffload) -> None:
    net, x = CASES[case](), torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x = x.repeat(8, 1)[:64] if case == "used twice" else x

    def loss(x: Tensor) -> Tensor:
        found: Tensor = net(x).sum()
        return found

    expected = gradients(torch.compile(loss, backend="aot_eager", fullgraph=True), net, [x], None)
    run = inside(loss) if when == "inside" else ours(loss)
    if when == "before, and it has run":
        gradients(run, net, [x], None)
    for _ in range(3):
        assert_same(gradients(run, net, [x], offload), expected)


def test_several_forwards_before_their_backwards_and_two_backwards_of_one(offload: ActivationOffload) -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    x = torch.randn(256, 64)

    def loss(x: Tensor) -> Tensor:
        found: Tensor = net(x).square().sum()
        return found

    def all_at_once(run: Call, around: Any) -> list[Tensor]:
        net.zero_grad()
        with around:
            losses = [run(x + n) for n in range(3)]
        losses[1].backward(retain_graph=True)
        for each in losses:
            each.backward()
        return [each.grad.clone() for each in net.parameters() if each.grad is not None]

    with torch._functorch.config.patch(donated_buffer=False):
        expected = all_at_once(torch.compile(loss, backend="aot_eager"), nullcontext())
        assert_same(all_at_once(ours(loss), offload), expected)


def test_blocks_compiled_one_by_one_with_eager_code_between(offload: ActivationOffload) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(4)]
    net, x = nn.Sequential(*layers), torch.randn(256, 64)

    def loss(call: Sequence[Call]) -> Call:
        def run(x: Tensor) -> Tensor:
            for each in call:
                x = x + each(x).sigmoid()
            return x.sum()

        return run

    expected = gradients(loss([torch.compile(each, backend="aot_eager") for each in layers]), net, [x], None)
    run = loss([ours(each) for each in layers])
    for _ in range(3):
        assert_same(gradients(run, net, [x], offload), expected)


def test_another_compiler_beside_ours_is_refused(offload: ActivationOffload) -> None:
    net, x = nn.Linear(64, 64), torch.randn(256, 64)
    run, foreign = ours(net), torch.compile(net, backend="aot_eager")
    with pytest.raises(Exception, match=r"torch\.compile was used inside save_on_disk"), offload:
        run(x).sum() + foreign(x).sum()


def test_sizes_that_vary_stay_in_memory_and_somebody_says_so(offload: ActivationOffload) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    run = ours(net, dynamic=True)
    with pytest.warns(UserWarning, match="their sizes vary from call to call: compile with dynamic=False"):
        gradients(lambda x: run(x).sum(), net, [torch.randn(256, 64)], offload)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"options": {"backend": "nvfuser"}}, r"options\['backend'\] is 'nvfuser': expected one of"),
        ({"mode": "reduce-overhead"}, "cannot be used with CUDA graphs"),
        ({"options": {"backend": "aot_eager", "max_autotune": True}}, "aot_eager has no mode and no options"),
    ],
)
def test_what_cannot_be_compiled_is_refused(more: dict[str, Any], match: str) -> None:
    run = torch.compile(lambda x: x.exp().sum(), backend=elastrain, **more)
    with pytest.raises(BackendCompilerFailed, match=match):
        run(torch.randn(64, requires_grad=True))


def test_the_entry_point_is_the_backend() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    module, name = points["elastrain"].split(":")
    assert getattr(import_module(module), name) is elastrain
