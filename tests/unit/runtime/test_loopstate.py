"""A newcomer's loop continues where the others are: hyperparameters, schedulers of every kind, registered objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from elastrain.errors import ConfigError
from elastrain.runtime.broadcast import BROADCASTS, OneValue, SentValues
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.loop_state import LoopState, settings_digest, stateful
from elastrain.runtime.loop_state.schedulers import schedulers_of

MAKERS: dict[str, Callable[[torch.optim.Optimizer], list[Any]]] = {
    "cosine": lambda o: [lr_scheduler.CosineAnnealingLR(o, 20)],
    "lambda": lambda o: [lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step))],
    "milestones": lambda o: [lr_scheduler.MultiStepLR(o, [3, 7, 7])],
    "one cycle": lambda o: [lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20)],
    "two chained by hand": lambda o: [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 4)],
    "sequential": lambda o: [
        lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
        )
    ],
}


LAYERS = Layers(torch.nn.Identity())


def _loop(optimizer: torch.optim.Optimizer, **registered: Any) -> LoopState:
    return LoopState(optimizer, registered, torch.nn.Linear(1, 1), Layers(torch.nn.Identity()))


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(3))
    return torch.optim.SGD([{"params": [weight], "momentum": 0.9}], lr=0.05)


def _hyper(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _advance(optimizer: torch.optim.Optimizer, schedulers: list[Any], steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:.*")
def test_a_newcomers_schedule_goes_on_exactly_where_the_others_are(kind: str) -> None:
    donor, newcomer = _optimizer(), _optimizer()
    donors, newcomers = MAKERS[kind](donor), MAKERS[kind](newcomer)
    giving, taking = _loop(donor), _loop(newcomer)
    _advance(donor, donors, 6)
    taking.load(giving.take(_hyper(donor)).text)
    told = [loop.take(_hyper(donor)).settings(6, [], LAYERS) for loop in (giving, taking)]
    assert told[0] == told[1], "a newcomer's votes are not those of a member that differs"
    assert newcomer.param_groups[0]["lr"] == donor.param_groups[0]["lr"]
    assert _advance(newcomer, newcomers, 8) == _advance(donor, donors, 8)


def test_what_was_changed_on_purpose_stays_and_all_else_is_taken_over() -> None:
    donor, resumed = _optimizer(), _optimizer()
    giving = _loop(donor)
    donor.param_groups[0]["weight_decay"] = 0.5
    resumed.param_groups[0].update(lr=0.2, momentum=0.7)
    taking = _loop(resumed)
    told, mine = giving.describe(_hyper(donor)), taking.describe(_hyper(resumed))
    changed = [name for name in told if told[name] != mine[name]]
    assert sorted(changed) == [f"{name} of parameter group 0" for name in ("lr", "momentum", "weight_decay")]
    taking.load(giving.take(_hyper(donor)).text, changed=["lr of parameter group 0", "momentum of parameter group 0"])
    group = resumed.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.2, 0.7, 0.5)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("kind", ["cosine", "lambda", "milestones", "two chained by hand"])
def test_a_changed_rate_that_a_scheduler_drives_keeps_its_course(kind: str) -> None:
    donor, resumed = _optimizer(), _optimizer()
    resumed.param_groups[0]["lr"] = 0.1
    donors, schedulers = MAKERS[kind](donor), MAKERS[kind](resumed)
    giving, taking = _loop(donor), _loop(resumed)
    told, mine = giving.describe(_hyper(donor)), taking.describe(_hyper(resumed))
    changed = [name for name in told if told[name] != mine[name]]
    assert changed == ["lr of parameter group 0", "initial_lr of parameter group 0"] or kind == "lambda"
    _advance(donor, donors, 6)
    taking.load(giving.take(_hyper(donor)).text, changed=changed)
    assert resumed.param_groups[0]["lr"] == pytest.approx(2 * donor.param_groups[0]["lr"])
    assert _advance(resumed, schedulers, 8) == pytest.approx([2 * rate for rate in _advance(donor, donors, 8)])


@pytest.mark.filterwarnings("ignore:.*")
def test_a_scheduler_of_another_class_begins_anew_where_that_was_accepted() -> None:
    donor, resumed = _optimizer(), _optimizer()
    donors, _ = MAKERS["cosine"](donor), MAKERS["two chained by hand"](resumed)
    giving, taking = _loop(donor), _loop(resumed)
    assert giving.describe([])["schedulers"] == ["CosineAnnealingLR"]
    assert taking.describe([])["schedulers"] == ["ExponentialLR", "StepLR"]
    _advance(donor, donors, 3)
    text = giving.take(_hyper(donor)).text
    with pytest.raises(ConfigError, match="all members must run the same script"):
        taking.load(text)
    taking.load(text, changed=["schedulers"])
    assert resumed.param_groups[0]["lr"] == donor.param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("make", "one", "other", "name"),
    [
        (lr_scheduler.CosineAnnealingLR, {"T_max": 9}, {"T_max": 5}, "T_max of scheduler 0"),
        (lr_scheduler.MultiStepLR, {"milestones": [2, 8]}, {"milestones": [2, 5]}, "milestones of scheduler 0"),
        (lr_scheduler.ReduceLROnPlateau, {"patience": 3}, {"patience": 4}, "patience of scheduler 0"),
    ],
)
def test_a_schedulers_own_settings_are_compared_and_stay_where_that_was_accepted(
    make: Any, one: dict[str, Any], other: dict[str, Any], name: str
) -> None:
    donor, resumed = _optimizer(), _optimizer()
    donors, (mine,) = [make(donor, **one)], [make(resumed, **other)]
    giving, taking = _loop(donor), _loop(resumed)
    told, wanted = giving.describe(_hyper(donor)), taking.describe(_hyper(resumed))
    json.loads(json.dumps(told, allow_nan=False))
    changed = [each for each in told if told[each] != wanted[each]]
    assert changed == [name]
    if make is not lr_scheduler.ReduceLROnPlateau:
        _advance(donor, donors, 3)
    text, before = giving.take(_hyper(donor)).text, mine.state_dict()
    taking.load(text, changed=changed)
    key = changed[0].partition(" of ")[0]
    assert mine.state_dict()[key] == before[key] != donors[0].state_dict()[key]
    assert mine.last_epoch == donors[0].last_epoch
    taking.load(text)
    assert mine.state_dict()[key] == donors[0].state_dict()[key]


def test_how_it_is_computed_is_no_part_of_it() -> None:
    optimizer = _optimizer()
    told = _loop(optimizer).describe([{**_hyper(optimizer)[0], "fused": True, "foreach": None}])
    assert not any(name.startswith(("fused", "foreach", "params")) for name in told)


def test_schedulers_are_found_by_their_optimizer_only() -> None:
    mine, other = _optimizer(), _optimizer()
    scheduler = lr_scheduler.StepLR(mine, 3)
    kept = lr_scheduler.StepLR(other, 3)
    assert schedulers_of(mine) == [scheduler]
    assert schedulers_of(other) == [kept]


class _Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "by name": {3: 0.1, "x": None}, "code": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        assert state["by name"] == {3: 0.1, "x": None}
        assert state["code"] is print, "code is never sent: everybody has it from the script"


def test_registered_objects_travel_with_the_loop() -> None:
    ours, theirs = _Counter(), _Counter()
    ours.seen = 41
    optimizer = _optimizer()
    text = _loop(optimizer, counter=ours).take(_hyper(optimizer)).text
    _loop(_optimizer(), counter=theirs).load(text)
    assert theirs.seen == 41


def test_another_script_is_refused() -> None:
    optimizer = _optimizer()
    text = _loop(optimizer, counter=_Counter()).take(_hyper(optimizer)).text
    with pytest.raises(ConfigError, match="same script"):
        _loop(_optimizer()).load(text)


def test_settings_digest_sees_every_bit_of_a_rate() -> None:
    rate = 0.1
    assert settings_digest([{"lr": rate}]) == settings_digest([{"lr": 0.1}])
    assert settings_digest([{"lr": rate}]) != settings_digest([{"lr": rate + 2**-56}])


def _moved(state: dict[str, Any], newcomers: dict[str, Any]) -> None:
    """From one member's registered things to those of a newcomer."""
    taken = _loop(_optimizer(), **state).take([{}])
    _loop(_optimizer(), **newcomers).load(taken.text, taken.payload())


def _net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2).bfloat16())
    net.register_buffer("cache", torch.rand(3), persistent=False)
    return net


def test_the_average_of_a_model_travels_bit_for_bit() -> None:
    teacher, newcomers = _net(1), _net(2)
    teacher[1].num_batches_tracked.add_(7)
    _moved({"teacher": teacher}, {"teacher": newcomers})
    tensors = [*teacher.state_dict().items(), ("cache", teacher.cache)]
    assert len(tensors) > 8
    for name, value in tensors:
        assert torch.equal(value, dict([*newcomers.state_dict().items(), ("cache", newcomers.cache)])[name]), name


def test_tensors_arrays_and_plain_containers_are_put_back_in_place() -> None:
    ours = {
        "ema": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "best": {"loss": np.float32(0.1), "step": 3},
        "seen": [1, (2, 3), None],
    }
    theirs = {
        "ema": torch.zeros(3, dtype=torch.bfloat16),
        "array": np.zeros((2, 3), dtype=np.int16),
        "best": {"other": 1},
        "seen": [],
    }
    places = {name: id(thing) for name, thing in theirs.items()}
    _moved(ours, theirs)
    assert {name: id(thing) for name, thing in theirs.items()} == places
    assert torch.equal(ours["ema"].view(torch.int16), theirs["ema"].view(torch.int16))
    assert np.array_equal(ours["array"], theirs["array"])
    assert theirs["best"] == ours["best"]
    assert type(theirs["best"]["loss"]) is np.float32
    assert theirs["seen"] == ours["seen"]


def test_a_tensor_that_is_changed_while_its_step_is_computed_is_told_by_name() -> None:
    teacher = _net(1)
    taken = _loop(_optimizer(), teacher=teacher).take([{}])
    taken.check()
    with torch.no_grad():
        teacher[0].weight.mul_(0.5)
    for late in (taken.check, taken.payload):
        with pytest.raises(
            ConfigError, match=r"teacher\['state'\]\['0.weight'\] was changed before its step was committed"
        ):
            late()


def test_members_whose_averages_differ_tell_different_settings_within_a_few_steps() -> None:
    ours, theirs = _net(1), _net(1)
    with torch.no_grad():
        theirs[2].bias.add_(1.0)
    told = [[_loop(_optimizer(), t=net).take([{}]).settings(n, [], LAYERS) for n in range(3)] for net in (ours, theirs)]
    assert told[0] != told[1]
    assert told[0] == [_loop(_optimizer(), t=_net(1)).take([{}]).settings(n, [], LAYERS) for n in range(3)]


def test_the_models_own_parameters_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"got parameter 'weight' of the model"):
        LoopState(_optimizer(), {"teacher": torch.nn.Sequential(model)}, model, LAYERS)


@pytest.mark.parametrize("thing", [3, 0.5, "word", None, (1, 2), object()])
def test_what_cannot_be_changed_in_place_cannot_be_registered(thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"job.register\('x', …\) takes"):
        stateful("x", thing)


@pytest.mark.parametrize(
    "part",
    [object(), torch.nn.Linear(1, 1), torch.eye(2).to_sparse(), torch.zeros(1, device="meta"), np.array([object()])],
    ids=lambda part: type(part).__name__,
)
def test_a_part_that_is_no_data_is_refused_with_its_place(part: Any) -> None:
    with pytest.raises(ConfigError, match=r"^book\['value'\]\['page'\]\[1\] is "):
        _loop(_optimizer(), book={"page": [1, part]}).take([{}])


def test_a_checkpoint_from_before_broadcasts_is_one_without_any() -> None:
    old = _loop(_optimizer()).take([{}]).text
    sent = SentValues()
    loop = _loop(_optimizer(), **{BROADCASTS: sent})
    loop.load(old)
    assert sent.state_dict() == {"digest": ""}
    sent.take(OneValue(1, 0).figures(0), torch.device("cpu"))
    newcomers = SentValues()
    _loop(_optimizer(), **{BROADCASTS: newcomers}).load(loop.take([{}]).text)
    assert newcomers.state_dict() == sent.state_dict()
