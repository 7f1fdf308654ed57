"""Shared forwards: a loop finds what it would have computed itself, and a forward with effects is not shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.integrations import shared_evaluation as module
from elastrain.integrations.shared_evaluation import ReadAhead, SharedForwards, shared_predictions

SAMPLES = torch.randn(53, 4, generator=torch.Generator().manual_seed(3))


class FakeJob:
    """Computes all batches, from the last to the first, as if other members had had them."""

    is_main = True

    def __init__(self) -> None:
        self.computed = 0
        self.is_computing = False

    def predict(self, fn: Callable[[Any], Any], dataset: Any, *, batch_size: int, collate_fn: Any) -> list[Any]:
        self.is_computing = True
        found = {at: fn(collate_fn([dataset[at]])) for at in reversed(range(len(dataset)))}
        self.is_computing = False
        self.computed += len(found)
        return [found[at] for at in range(len(dataset))]

    def broadcast(self, thing: Any) -> Any:
        return thing


class Net(nn.Module):
    """A model whose forward has an effect by its name."""

    def __init__(self, effect: str = "") -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))
        self.effect, self.calls, self.kept = effect, 0, list[Tensor]()

    def forward(self, x: Tensor, scale: float = 1.0) -> Mapping[str, Any]:
        out: Any = self.inner(x) * scale
        match self.effect:
            case "counts":
                self.calls += 1
            case "keeps":
                self.kept.append(out)
            case "draws":
                out = out + torch.rand(())
            case "buffers":
                self.count += 1
            case "returns code":
                return {"logits": out, "more": self}
        return {"logits": out, "more": (None, len(x))}


def batches(size: int = 5) -> list[tuple[Tensor, int]]:
    return [(SAMPLES[at : at + size], at) for at in range(0, len(SAMPLES), size)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZES", (1, 2))
    monkeypatch.setattr(module, "_CHUNK", 4)


def loop(model: nn.Module, job: Any, call: Callable[[Tensor, int], Any]) -> Iterator[Any]:
    ahead = ReadAhead(batches())
    model.eval()
    with torch.no_grad(), SharedForwards(job, model, [ahead], lambda: True).entered():
        for x, at in ahead:
            yield call(x, at)


def test_a_loop_finds_its_own_forwards() -> None:
    model, job = Net(), FakeJob()
    right = [model(x)["logits"] for x, _ in batches()]
    found = list(loop(model, job, lambda x, _: model(x)))
    assert job.computed == 10  # all but the trial
    assert [each["more"] for each in found] == [(None, len(x)) for x, _ in batches()]
    assert all(torch.equal(each["logits"], wanted) for each, wanted in zip(found, right, strict=True))
    assert "forward" not in vars(model)


def test_a_library_may_read_ahead_itself() -> None:
    model, job, ahead = Net().eval(), FakeJob(), ReadAhead(batches())
    with torch.no_grad(), SharedForwards(job, model, [ahead], lambda: True).entered():
        source, found, waiting = iter(ahead), [], list[Any]()
        for x, _ in source:
            waiting.append(x)
            if len(waiting) > 2:
                found.append(model(waiting.pop(0))["logits"])
        found += [model(x)["logits"] for x in waiting]
        assert all(torch.equal(f, model(x)["logits"]) for f, (x, _) in zip(found, batches(), strict=True))
    assert job.computed == 10


@pytest.mark.parametrize("effect", ["counts", "keeps", "draws", "buffers", "returns code"])
def test_a_forward_with_an_effect_is_computed_by_every_member(effect: str) -> None:
    model, job = Net(effect), FakeJob()
    assert len(list(loop(model, job, lambda x, _: model(x)))) == 11
    assert job.computed == 0
    assert (model.calls, len(model.kept), int(model.get_buffer("count"))) == {
        "counts": (11, 0, 0),
        "keeps": (0, 11, 0),
        "buffers": (0, 0, 11),
    }.get(effect, (0, 0, 0))


def test_a_hook_inside_of_the_model_sees_every_batch() -> None:
    model, job, seen = Net(), FakeJob(), list[Any]()
    model.inner.register_forward_hook(lambda *told: seen.append(told))
    list(loop(model, job, lambda x, _: model(x)))
    assert (len(seen), job.computed) == (11, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x, at: model(x * 2),
        lambda model, x, at: model(x, scale=float(at)),
        lambda model, x, at: model(x.clone()),
    ],
    ids=["another tensor", "another number", "a copy"],
)
def test_what_depends_on_more_than_the_batch_is_computed_here(call: Callable[..., Any]) -> None:
    model, job = Net(), FakeJob()
    right = [call(model, x, at)["logits"] for x, at in batches()]
    found = list(loop(model, job, lambda x, at: call(model, x, at)))
    assert job.computed == 0
    assert all(torch.equal(each["logits"], wanted) for each, wanted in zip(found, right, strict=True))


def test_a_second_forward_of_a_batch_is_computed_here() -> None:
    model, job = Net(), FakeJob()
    inside = 0
    inner_forward = model.inner.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal inside
        inside += not job.is_computing
        return inner_forward(x)

    model.inner.forward = counted  # type: ignore[method-assign]
    list(loop(model, job, lambda x, _: (model(x), model(x))))
    assert inside == 2 + 10  # of the trial both


@pytest.mark.parametrize("state", ["training", "gradients"])
def test_a_loop_that_trains_is_left_alone(state: str) -> None:
    model, job, ahead = Net(), FakeJob(), ReadAhead(batches())
    model.train(state == "training")
    with torch.set_grad_enabled(state == "gradients"), SharedForwards(job, model, [ahead], lambda: True).entered():
        assert len([model(x) for x, _ in ahead]) == 11
    assert job.computed == 0


def test_predictions_of_a_trainer_are_its_own() -> None:
    class Trainer:
        job = FakeJob()
        preprocess_logits_for_metrics: Any = staticmethod(lambda logits, labels: logits + labels)

        def prediction_step(self, model: Any, inputs: Any, only_loss: bool) -> Any:
            assert not only_loss
            return inputs[0].mean(), inputs[0].sum(1), torch.tensor(inputs[1])

    trainer: Any = Trainer()
    with shared_predictions(trainer, batches()) as loader:
        assert trainer.preprocess_logits_for_metrics is None
        found = [trainer.prediction_step(None, inputs, False) for inputs in loader]
    right = [(x.mean(), x.sum(1) + at, torch.tensor(at)) for x, at in batches()]
    assert all(all(map(torch.equal, one, other)) for one, other in zip(found, right, strict=True))
    assert len(found) == trainer.job.computed == 11
    assert "prediction_step" not in vars(trainer) and trainer.preprocess_logits_for_metrics is not None


def test_no_more_is_read_than_the_loop_takes() -> None:
    read = []

    def source() -> Iterator[int]:
        for at in range(100):
            read.append(at)
            yield at

    assert list(ReadAhead(source(), limit=lambda: 5)) == list(range(5))
    assert len(read) == 5
