"""Programs that write where autograd has saved: the outcome is that of plain PyTorch, gradients or a refusal."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor, nn

from elastrain.offload import ActivationOffload, ModifiedInPlaceError, OffloadConfig, SpillReadError, save_on_disk
from elastrain.offload.drives.posix import PosixEngine
from tests.support.memory_engine import MemoryEngine

Around = AbstractContextManager[Any]
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[ActivationOffload]:
    made = save_on_disk([tmp_path], min_bytes=1, deadline_s=20.0)
    yield made
    gc.collect()
    made.close()  # which ends what is being written
    stats = made.stats()
    assert (stats.live_bytes, [each.used_bytes for each in stats.devices]) == (0, [0])


class WritesSaved(torch.autograd.Function):
    """Writes into what it has saved, in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return gradients[0] * x


def written_before_another_reads(layer: nn.Linear, around: Around) -> None:
    with around:
        h = layer(X)
        square = h.square()
        loss = (square + WritesSaved.apply(h)).sum()
    del h, square
    loss.backward()


def written_in_the_first_of_two_backwards(layer: nn.Linear, around: Around) -> None:
    with around:
        loss = WritesSaved.apply(layer(X)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def written_by_two(layer: nn.Linear, around: Around) -> None:
    with around:
        h = torch.tanh(layer(X))
        loss = (WritesSaved.apply(h) + WritesSaved.apply(h)).sum()
    loss.backward()


def written_after_saving(view: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear, Around], None]:
    def program(layer: nn.Linear, around: Around) -> None:
        with around:
            saved = view(layer(X))
            loss = (saved * saved).abs().sum()
            with torch.no_grad():
                saved.mul_(2)
        loss.backward()

    return program


def refilled(layer: nn.Linear, around: Around) -> None:
    """Empties the memory of a saved output, and fills it in a hook, as Megatron does."""
    with around:
        h = torch.sin(layer(X))
        kept, memory = h.detach().clone(), h.untyped_storage()
        y = h * layer(h)
        memory.resize_(0)

    def fill(_: Tensor) -> None:
        memory.resize_(kept.nbytes)
        memory.copy_(kept.untyped_storage())

    y.register_hook(fill)
    del h
    y.sum().backward()


def filled_with_other_values(layer: nn.Linear, around: Around) -> None:
    with around:
        h = torch.sin(layer(X))
        y = h * layer(h)
        h.untyped_storage().copy_(X.untyped_storage())
    del h
    y.sum().backward()


def moved_to_shared_memory(layer: nn.Linear, around: Around) -> None:
    with around:
        h = torch.sin(layer(X))
        y = h * layer(h)
        h.detach().share_memory_()
    del h
    y.sum().backward()


def forward_mode(layer: nn.Linear, around: Around) -> None:
    with around, fwd.dual_level():
        y = layer(F.gelu(F.layer_norm(layer(torch.tanh(layer(fwd.make_dual(X, X + 1)))), (64,))))
        value, tangent = fwd.unpack_dual(y)
        loss = value.square().mean() + tangent.square().mean()
    loss.backward()


def jvp(layer: nn.Linear, around: Around) -> None:
    with around:
        value, tangent = torch.func.jvp(lambda x: layer(torch.tanh(layer(x))), (X,), (X,))
        loss = value.square().mean() + tangent.square().mean()
    loss.backward()


def nested(layer: nn.Linear, around: Around) -> None:
    rows = torch.nested.nested_tensor([X[:3], X[:60], X[:17]], layout=torch.strided)
    with around:
        loss = torch.nested.to_padded_tensor(layer(F.relu(layer(rows))), 0.0).square().sum()
    loss.backward()


def empty(layer: nn.Linear, around: Around) -> None:
    with around:
        h = torch.tanh(layer(X))
        loss = torch.tanh(h[:0].clone()).sum() + h.sum()
    loss.backward()


@pytest.mark.parametrize("limit_bytes", [None, 192 << 10], ids=["no limit", "a limit"])
@pytest.mark.parametrize(
    "program",
    [
        written_before_another_reads,
        written_in_the_first_of_two_backwards,
        written_by_two,
        pytest.param(written_after_saving(lambda h: h[:, :5]), id="a view"),
        pytest.param(written_after_saving(lambda h: torch.complex(h, h).conj()), id="a conjugated view"),
        pytest.param(written_after_saving(lambda h: torch.complex(h, h).conj().imag), id="a negated view"),
        refilled,
        filled_with_other_values,
        moved_to_shared_memory,
        forward_mode,
        jvp,
        nested,
        empty,
    ],
)
def test_the_outcome_is_that_of_plain_pytorch(
    program: Callable[[nn.Linear, Around], None], limit_bytes: int | None, offload: ActivationOffload
) -> None:
    if limit_bytes is not None:
        offload.set_memory_limit(limit_bytes)

    def outcome(around: Around) -> list[Tensor] | str:
        torch.default_generator.manual_seed(0)
        layer = nn.Linear(64, 64)
        try:
            program(layer, around)
        except RuntimeError:
            return "refused"
        return [each.grad for each in layer.parameters() if each.grad is not None]

    expected = outcome(nullcontext())
    for _ in range(3):
        found = outcome(offload)
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected
        else:
            assert all(map(torch.equal, found, expected))
    outcome(offload if isinstance(expected, list) else nullcontext())  # torch keeps the last graph that was refused


def test_memory_that_is_not_filled_again_is_refused_by_name(offload: ActivationOffload) -> None:
    x = X.clone().requires_grad_()
    with offload:
        h = torch.sin(x)
        y = h * h
        h.untyped_storage().resize_(0)
    with pytest.raises(ModifiedInPlaceError, match="was resized from 16384 to 0 bytes: fill it again before backward"):
        y.sum().backward()


class Slow(MemoryEngine):
    """Begins a write, and waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.is_writing = False

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        self.is_writing = True
        self.began.set()
        self.goes_on.wait(20.0)
        super().write(offset_bytes, views)
        self.is_writing = False


@pytest.mark.parametrize("way", [lambda h: h.untyped_storage().resize_(0), torch.Tensor.share_memory_])
def test_memory_that_is_being_written_is_not_freed_before_that_has_ended(way: Callable[[Tensor], object]) -> None:
    engine = Slow()
    offload = ActivationOffload(OffloadConfig(dirs=("/",), min_bytes=1), engines=[engine])
    with offload:
        h = torch.sin(X.clone().requires_grad_())
        y = h * h
    engine.began.wait(20.0)
    threading.Timer(0.2, engine.goes_on.set).start()
    way(h.detach())
    assert not engine.is_writing
    del h, y
    offload.close()


def trains(offload: ActivationOffload, times: int = 1) -> None:
    def gradient(around: Around) -> Tensor | None:
        x = X.clone().requires_grad_()
        with around:
            y = torch.tanh(torch.cat([x] * times)).sum()
        y.backward()
        return x.grad

    expected, found = gradient(nullcontext()), gradient(offload)
    assert expected is not None and found is not None
    assert torch.equal(expected, found)


def test_a_directory_is_where_it_was_when_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    offloads = [save_on_disk(each, min_bytes=1) for each in ("here", "link", "~/here")]
    (tmp_path / "link").unlink()
    monkeypatch.chdir("elsewhere")
    for each in offloads:
        trains(each)
        assert each.stats().devices[0].name == str(tmp_path / "here")
        each.close()


@pytest.mark.parametrize("way", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("moved"))])
def test_training_outlives_the_directory(tmp_path: Path, way: Callable[[Path], None]) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    engine = PosixEngine(folder)
    offload = ActivationOffload(OffloadConfig(dirs=(str(folder),), min_bytes=1), engines=[engine])
    trains(offload)
    way(folder)
    engine.reserve(2 * offload.stats().devices[0].slab_bytes)
    trains(offload, times=100)
    assert offload.stats().devices[0].capacity_bytes > 0
    offload.close()


def test_a_forked_process_trains_and_cannot_ask_for_what_another_saved(offload: ActivationOffload) -> None:
    x = X.clone().requires_grad_()
    with offload:
        y = torch.tanh(x).sum()
    child = os.fork()
    if not child:
        try:
            trains(offload)
            y.backward()
        except SpillReadError as error:
            os._exit(7 if "another process saved this activation" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    y.backward()
