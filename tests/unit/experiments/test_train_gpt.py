"""The training program's model, data and schedule: what every comparison and every bit depends on."""

from __future__ import annotations

from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from experiments.train_gpt import data
from experiments.train_gpt.model import SIZES, GPTConfig, build, decay_groups, next_token_loss, parameter_count
from experiments.train_gpt.schedule import FINAL_LR_FRACTION, adamw, cosine_factor, cosine_with_warmup, held_out_loss


def _expected_parameters(config: GPTConfig) -> int:
    layer = 12 * config.width**2 + 13 * config.width
    return config.layers * layer + (config.vocabulary + config.context) * config.width + 2 * config.width


@pytest.mark.parametrize("size", SIZES)
def test_parameter_count_is_that_of_the_shape_with_the_tied_weight_once(size: str) -> None:
    with torch.device("meta"):
        model = build(size, seed=0)
    assert parameter_count(model) == _expected_parameters(SIZES[size])


def test_tiny_has_about_one_and_a_half_million_parameters() -> None:
    assert 1.3e6 < parameter_count(build("tiny", seed=0)) < 1.7e6


def test_head_is_the_embedding_and_its_gradient_comes_from_both_uses() -> None:
    model = build("tiny", seed=0)
    assert model.head.weight is model.embedding.weight
    tokens = torch.zeros(1, 4, dtype=torch.long)
    next_token_loss(model, (tokens, tokens)).backward()  # type: ignore[no-untyped-call]
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient[0].any(), "from the embedding"
    assert gradient[200].any(), "from the head: token 200 is no input"


def test_same_seed_builds_the_same_weights_and_leaves_the_default_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = build("tiny", seed=1), build("tiny", seed=1), build("tiny", seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_unknown_size_is_named() -> None:
    with pytest.raises(ValueError, match="tiny, small, 124m; got 'huge'"):
        build("huge", seed=0)


def test_no_token_sees_a_later_one() -> None:
    model = build("tiny", seed=0).eval()
    tokens = torch.arange(32).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 20:] = 99
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_dropout_is_on_in_training_and_off_in_eval() -> None:
    model = build("tiny", seed=0)
    tokens = torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_every_parameter_is_in_exactly_one_group_and_vectors_do_not_decay() -> None:
    model = build("tiny", seed=0)
    groups = adamw(model, lr=1e-3).param_groups
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in model.parameters())
    assert [all(p.dim() >= 2 for p in group["params"]) for group in groups] == [True, False]
    assert [group["weight_decay"] for group in decay_groups(model, weight_decay=0.1)] == [0.1, 0.0]


def test_schedule_rises_linearly_then_falls_to_its_final_fraction() -> None:
    factors = [cosine_factor(step, warmup_steps=4, total_steps=20) for step in range(25)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert all(a >= b for a, b in pairwise(factors[4:]))
    assert factors[20] == factors[24] == pytest.approx(FINAL_LR_FRACTION)


def test_schedule_drives_the_optimizer_it_was_made_for() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = cosine_with_warmup(optimizer, warmup_steps=2, total_steps=10)
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_source_files_are_sorted_and_leave_tests_packages_and_build_settings_out(tmp_path: Path) -> None:
    for name in (
        "z.py",
        "a/b.py",
        "a.py",
        "test/t.py",
        "a/tests/u.py",
        "site-packages/p.py",
        "_sysconfigdata_x.py",
        "notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in data.source_files(tmp_path)] == ["a.py", "a/b.py", "z.py"]


@pytest.mark.parametrize(
    ("sizes", "cut"), [([100, 90, 5, 5], 2), ([95, 4, 1], 1), ([50, 50], 1), ([1, 1000], 1), ([7], 0)]
)
def test_held_out_tail_is_the_shortest_that_is_large_enough(sizes: list[int], cut: int) -> None:
    assert data.split_files(sizes) == cut


def test_text_is_the_same_at_every_reading_and_splits_share_nothing() -> None:
    digest = data.text_digest("train")
    data._texts.cache_clear()
    assert data.text_digest("train") == digest != data.text_digest("held_out")
    total = sum(path.stat().st_size for path in data.source_files())
    held_out = data.text("held_out").numel()
    assert data.text("train").numel() + held_out == total
    assert 0.05 <= held_out / total < 0.1


def test_windows_tile_the_text_and_targets_are_one_byte_ahead() -> None:
    windows = data.Windows("train", context=128)
    text = data.text("train")
    inputs, targets = windows[3]
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, text[384:512].long())
    assert torch.equal(targets, text[385:513].long())
    assert windows[len(windows) - 1][1].shape == (128,)
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_dataset_travels_to_loader_processes_without_its_text() -> None:
    windows = data.Windows("train", context=128)
    assert len(windows) > 50_000
    assert len(bytes(ForkingPickler.dumps(windows))) < 1000


def test_held_out_loss_repeats_exactly_and_leaves_the_model_in_training_mode() -> None:
    model = build("tiny", seed=0)
    losses = {held_out_loss(model, context=128, windows=3, batch_size=batch_size) for batch_size in (2, 2)}
    assert len(losses) == 1
    assert model.training
    assert losses.pop() == pytest.approx(5.545, abs=0.3), "close to ln 256 before training"
