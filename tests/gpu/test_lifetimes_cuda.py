"""Training on a CUDA device within a limit has the bits of plain training; skipped without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.cuda import host_tier
from elastrain.offload.lifetimes.within import within
from experiments.lifetimes.device import highest_peak
from experiments.lifetimes.worker import end_step
from experiments.offload.models import KINDS, Shape, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = Shape(width=1024, layers=8, tokens=512, batch=4)
STEPS = 5


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Copies of parameters and states on the host; the allocator's peak over what was there before."""

    values: list[Tensor]
    peak_bytes: int


def trained(
    kind: str,
    folder: Path | None,
    limit_bytes: int = 0,
    *,
    autocast: bool = False,
    backwards: int = 1,
    host_bytes: int = 0,
) -> Trained:
    gc.collect()  # models that trained before, which are garbage in cycles by now
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model, _ = build(kind, SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = None
    if folder is not None:
        engines = [host_tier(host_bytes), PosixEngine(folder)] if host_bytes else None
        training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes, engines=engines)
    torch.manual_seed(7)
    with highest_peak() as peak_bytes:
        for step in range(STEPS):
            for part in range(backwards):
                generator = torch.Generator().manual_seed(step * backwards + part)
                tokens = torch.randint(0, SHAPE.vocabulary, (SHAPE.batch, SHAPE.tokens), generator=generator).cuda()
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = model(tokens)
                loss.backward()
            end_step(model, optimizer, training)
        most_bytes = peak_bytes() - before_bytes
    if training is None:
        return Trained(values=values(model, optimizer), peak_bytes=most_bytes)
    with training.whole():
        found = values(model, optimizer)
    training.close()
    return Trained(values=found, peak_bytes=most_bytes)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for each in model.parameters() for value in optimizer.state[each].values()]
    return [each.detach().cpu().clone() for each in (*model.parameters(), *states)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_plain_training(kind: str, tmp_path: Path) -> None:
    plain = trained(kind, None)
    for part in (0.75, 0.5, 0.25):
        ours = trained(kind, tmp_path, int(part * plain.peak_bytes))
        assert all(torch.equal(a, b) for a, b in zip(ours.values, plain.values, strict=True)), part
        assert ours.peak_bytes <= int(part * plain.peak_bytes)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("autocast", "backwards"), [(True, 1), (False, 3)])
def test_autocast_and_several_backwards(autocast: bool, backwards: int, tmp_path: Path) -> None:
    plain = trained("gpt", None, autocast=autocast, backwards=backwards)
    ours = trained("gpt", tmp_path, plain.peak_bytes // 2, autocast=autocast, backwards=backwards)
    assert all(torch.equal(a, b) for a, b in zip(ours.values, plain.values, strict=True))


def test_host_memory_above_the_drive(tmp_path: Path) -> None:
    plain = trained("gpt", None)
    ours = trained("gpt", tmp_path, plain.peak_bytes // 4, host_bytes=1 << 30)
    assert all(torch.equal(a, b) for a, b in zip(ours.values, plain.values, strict=True))
    assert ours.peak_bytes <= plain.peak_bytes // 4


def test_a_second_stream_is_refused(tmp_path: Path) -> None:
    with torch.device("cuda"):
        model, tokens = build("gpt", Shape(width=64, layers=4, tokens=32, batch=2))
    within(model, torch.optim.AdamW(model.parameters()), dirs=[str(tmp_path)], memory_limit=64 << 20)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other), pytest.raises(OffloadConfigError, match="a second CUDA stream"):
        model(tokens)
