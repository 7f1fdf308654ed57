"""What `within` and `step` cannot work with ends in one sentence, before anything was done with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload import OffloadConfigError, TrainingWithin, save_on_disk, within

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")


class Layers(nn.Module):
    """Four layers that are alike."""

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(64, 64)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def begin(model: Any, folder: Path, **given: Any) -> TrainingWithin:
    return within(**{"model": model, "dirs": folder, "memory_limit": 8 << 20, "optimizer": sgd(Layers()), **given})


def digest(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"memory_limit": 1e9}, "memory_limit must be a whole number of bytes, 8 << 30 say, got 1000000000.0"),
        ({"memory_limit": "8G"}, "memory_limit must be a whole number of bytes, 8 << 30 say, got '8G'"),
        ({"memory_limit": None}, "memory_limit must be a whole number of bytes, 8 << 30 say, got None"),
        ({"memory_limit": True}, "memory_limit must be a whole number of bytes, 8 << 30 say, got True"),
        ({"dirs": None}, "dirs must be one directory or several, each a path, got None"),
        ({"dirs": [3]}, "dirs must be one directory or several, each a path, got [3]"),
        ({"dirs": "/none/such"}, "/none/such is not a directory"),
        ({"engines": ["ssd"]}, "engines must have drives (elastrain.offload.drives), got 'ssd'"),
        ({"policy": "fast"}, "policy must be a Policy of elastrain.offload.planning.plan_search, got 'fast'"),
        ({"optimizer": "adamw"}, "the optimizer must be one of torch.optim, got str"),
        ({"optimizer": None}, "the optimizer must be one of torch.optim, got NoneType"),
    ],
)
def test_what_is_none_of_its_kind_is_refused(given: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = Layers()
    with pytest.raises(OffloadConfigError, match=f"^{re.escape(sentence)}"):
        begin(model, tmp_path, **{"optimizer": sgd(model), **given})


def test_a_directory_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for second in (tmp_path, str(tmp_path), tmp_path / "link"):
        with pytest.raises(OffloadConfigError, match=r"^dirs must be several directories, .* are one: name it once$"):
            begin(model := Layers(), [tmp_path, second], optimizer=sgd(model))  # type: ignore[arg-type]
        with pytest.raises(OffloadConfigError, match="are one: name it once"):
            save_on_disk([tmp_path, second])


def sparse() -> nn.Module:
    model = Layers()
    model.layers[1].weight = nn.Parameter(torch.eye(64).to_sparse())  # type: ignore[assignment]
    return model


def expanded() -> nn.Module:
    model = Layers()
    model.layers[1].weight.data = torch.ones(1).expand(64, 64)
    return model


def partly_without_values() -> nn.Module:
    model = Layers()
    model.layers[1] = nn.Linear(64, 64, device="meta")
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: len, "the model must be a torch.nn.Module that Python runs, got builtin_function_or_method"),
        (lambda: torch.jit.trace(Layers(), torch.ones(2, 64)), "the model must be"),
        (lambda: Layers(nn.ReLU), "Layers has no parameters"),
        (lambda: Layers(lambda: nn.LazyLinear(64)), r"layers\.0\.weight has no size yet"),
        (lambda: Layers(lambda: nn.Linear(64, 64, device="meta")), r"layers\.0\.weight is on the meta device"),
        (partly_without_values, r"layers\.1\.weight is on the meta device"),
        (sparse, r"layers\.1\.weight must be a dense tensor"),
        (expanded, r"layers\.1\.weight must be a dense tensor"),
    ],
)
def test_a_model_that_cannot_leave_memory_is_refused(make: Callable[[], Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(OffloadConfigError, match=f"^{sentence}"):
        begin(make(), tmp_path)


def test_a_model_that_is_within_a_limit_is_refused_until_that_ends(tmp_path: Path) -> None:
    model, x = Layers(), torch.ones(2, 64)
    before = digest(model)
    training = begin(model, tmp_path, optimizer=sgd(model))
    for again in (model, nn.Sequential(*model.layers)):
        with pytest.raises(OffloadConfigError, match="trains within a limit already"):
            begin(again, tmp_path, optimizer=sgd(again))
    begin(other := Layers(), tmp_path, optimizer=sgd(other)).close()
    training.close()
    training = begin(model, tmp_path, optimizer=sgd(model))
    assert all(torch.equal(mine, old) for mine, old in zip(digest(model), before, strict=True))
    model(x).backward()
    training.step()
    training.close()


@pytest.mark.parametrize("norm", [-1.0, float("nan"), "1", True, torch.ones(2), [1.0], lambda: 1.0])
def test_a_norm_that_is_none_is_refused_and_nothing_has_happened(norm: Any, tmp_path: Path) -> None:
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    training, optimizer = begin(model, tmp_path, optimizer=sgd(model)), sgd(plain)
    model(torch.ones(2, 64)).backward()
    with pytest.raises(OffloadConfigError, match=r"^max_grad_norm must be a number that is not negative, or None"):
        training.step(max_grad_norm=norm)
    training.step(max_grad_norm=0.5)
    training.close()
    plain(torch.ones(2, 64)).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    assert all(torch.equal(mine, other) for mine, other in zip(digest(model), digest(plain), strict=True))


def test_a_step_whose_gradients_are_not_finite_is_skipped_as_a_scaler_skips_it(tmp_path: Path) -> None:
    model, plain = Layers(), Layers()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    training = begin(model, tmp_path, optimizer=optimizers[1])
    for step in range(6):
        x = torch.full((2, 64), float("inf") if step in (0, 3) else step + 1.0)
        for each, scaler, optimizer in zip((plain, model), scalers, optimizers, strict=True):
            scaler.scale(each(x)).backward()
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scalers[0].step(optimizers[0])
        optimizers[0].zero_grad()
        norm = training.step(max_grad_norm=1.0, only_finite=True)
        assert norm is not None and bool(norm.isfinite()) == (step not in (0, 3))
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    training.close()
    assert all(torch.equal(mine, other) for mine, other in zip(digest(model), digest(plain), strict=True))


def test_a_step_after_the_end_is_refused(tmp_path: Path) -> None:
    for end in (TrainingWithin.close, TrainingWithin.abandon):
        model = Layers()
        training = begin(model, tmp_path, optimizer=sgd(model))
        end(training)
        with pytest.raises(OffloadConfigError, match="the training has ended"):
            training.step()


def test_sizes_of_activations_are_looked_at_alike(tmp_path: Path) -> None:
    for name in ("memory_limit", "quota"):
        with pytest.raises(OffloadConfigError, match=f"^{name} must be a whole number of bytes"):
            save_on_disk(tmp_path, **{name: "8G"})
