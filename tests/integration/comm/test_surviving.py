"""DDP under `surviving`: members are killed at every point of a step, and replicas stay bitwise equal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from elastrain.comm.errors import Aborted
from elastrain.comm.groups.group_generation import GroupGeneration
from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.torch_backend.survival import StepDecision, judge, may_go_on, surviving
from tests.integration.comm.test_torch import _batch, _digest, _model, run

_KILL_AT = 3
_STEPS = _KILL_AT + 10


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(when: str, ddp: DistributedDataParallel) -> None:
    """Make this process die at that point of its next step."""
    communicator = bootstrap.session().communicator
    if when == "forward":
        _die()
    elif when == "backward":
        first = next(iter(ddp.module.parameters()))
        first.register_post_accumulate_grad_hook(lambda _: _die())  # the last gradient: other buckets are on their way
    else:
        sends = 0
        mesh = communicator._mesh
        send = mesh.send

        def send_and_die(member: str, kind: int, body: bytes, tensors: Any = ()) -> None:
            nonlocal sends
            if b"barrier" in body:
                sends += 1
                if when == "before the vote":
                    _die()
                if sends == 2:  # one survivor has heard that all are complete, the other one has not
                    _die()
            send(member, kind, body, tensors)

        mesh.send = send_and_die  # type: ignore[method-assign]

        # On one host nothing is sent: one write shows it to all, but not all have looked when the writer dies.
        publish = GroupGeneration._publish

        def publish_and_die(self: GroupGeneration, words: bytes, *parts: Any, **options: Any) -> None:
            nonlocal sends
            if words.startswith(b"barrier"):
                sends += 1
                if when == "before the vote":
                    _die()
                publish(self, words, *parts, **options)
                if sends == 2:
                    _die()
            else:
                publish(self, words, *parts, **options)

        GroupGeneration._publish = publish_and_die  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("when", "victim"),
    [
        ("forward", 1),
        ("backward", 0),
        ("backward", 2),
        ("before the vote", 1),
        ("between two votes", 0),  # rank 0 tells the others the outcome
    ],
)
@pytest.mark.parametrize("nodes", [False, True], ids=["one-node", "nodes"])
def test_replicas_stay_equal_whenever_a_member_is_killed(tmp_path: Path, when: str, victim: int, nodes: bool) -> None:
    def body(rank: int) -> tuple[int, int, list[str]]:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
        for step in range(_STEPS):
            if step == _KILL_AT and rank == victim:
                _arm(when, ddp)
            for attempt in surviving(ddp, optimizer):
                with attempt:
                    optimizer.zero_grad()
                    loss = ddp(_batch(rank, step)).square().mean()
                    dist.all_reduce(loss.detach().clone())  # a loss may also be noticed between forward and backward
                    loss.backward()
        return bootstrap.session().steps, dist.get_world_size(), _digest(ddp)

    said = [s for s in run(3, tmp_path / "store", body, nodes=nodes, expect_killed=(victim,)) if s is not None]
    assert said[0] == said[1]
    assert said[0][:2] == [_STEPS, 2]


class _Coupled(torch.nn.Module):
    """A model whose own forward and backward communicate: there a loss is raised in the middle of DDP's backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(20, 300), torch.nn.Linear(300, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = all_reduce(self.first(batch))  # type: ignore[no-untyped-call] # torch's own
        out: torch.Tensor = self.last(hidden.relu())
        return out


def test_a_loss_that_cuts_a_backward_pass_short_leaves_the_model_usable(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, list[str]]:
        ddp = DistributedDataParallel(_Coupled(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
        for step in range(_STEPS):
            if step == _KILL_AT and rank == 1:
                ddp.module.last.weight.register_post_accumulate_grad_hook(lambda _: _die())
            for attempt in surviving(ddp, optimizer):
                with attempt:
                    optimizer.zero_grad()
                    ddp(_batch(rank, step)).square().mean().backward()
        return dist.get_world_size(), _digest(ddp)

    first, _, third = run(3, tmp_path / "store", body, expect_killed=(1,))
    assert first == third and first[0] == 2


def test_two_of_four_killed_in_the_same_step(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[int, list[str]]:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(_STEPS):
            if step == _KILL_AT and rank in (1, 2):
                _arm("backward" if rank == 1 else "before the vote", ddp)
            for attempt in surviving(ddp, optimizer):
                with attempt:
                    optimizer.zero_grad()
                    ddp(_batch(rank, step)).square().mean().backward()
        return dist.get_world_size(), _digest(ddp)

    first, _, _, last = run(4, tmp_path / "store", body, expect_killed=(1, 2))
    assert first == last and first[0] == 2


def _train_until_lost(rank: int, victims: tuple[int, ...]) -> tuple[int, str]:
    """How many steps were made, and what ended them."""
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    try:
        for step in range(_STEPS):
            if step == _KILL_AT and rank in victims:
                _die()
            for attempt in surviving(ddp, optimizer):
                with attempt:
                    optimizer.zero_grad()
                    ddp(_batch(rank, step)).square().mean().backward()
    except Aborted as error:
        return bootstrap.session().steps, error.reason
    return bootstrap.session().steps, ""


def test_one_of_two_on_a_host_goes_on_because_the_death_of_the_other_is_proven(tmp_path: Path) -> None:
    said = run(2, tmp_path / "store", lambda rank: _train_until_lost(rank, (0,)), expect_killed=(0,))
    assert said[1] == [_STEPS, ""]


def test_half_of_the_hosts_does_not_go_on_because_the_others_may_be_alive(tmp_path: Path) -> None:
    said = run(4, tmp_path / "store", lambda rank: _train_until_lost(rank, (1, 2)), nodes=True, expect_killed=(1, 2))
    for steps, reason in (said[0], said[3]):
        assert steps <= _KILL_AT and "that may be alive are here" in reason


@pytest.mark.parametrize(
    ("agreed", "survivors", "proven", "allowed"),
    [
        ("abc", "ab", "", True),
        ("abcd", "ab", "", False),
        ("abcd", "ab", "c", True),
        ("ab", "a", "", False),
        ("ab", "a", "b", True),
        ("abcde", "ab", "c", False),
        ("abcde", "ab", "cd", True),
        ("abc", "abx", "", True),  # who came later has no voice in what was agreed before
        ("abc", "axy", "", False),
    ],
)
def test_more_than_half_of_those_who_may_be_alive_goes_on(
    agreed: str, survivors: str, proven: str, allowed: bool
) -> None:
    assert may_go_on(agreed, survivors, proven)[0] is allowed


def test_a_sharded_model_is_refused_in_words(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model = _model()
        fully_shard(model)
        with pytest.raises(TypeError, match="does not survive a loss yet"):
            next(surviving(model, torch.optim.SGD(model.parameters(), 0.1)))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected a DistributedDataParallel"):
            next(surviving(_model(), torch.optim.SGD(_model().parameters(), 0.1)))  # type: ignore[arg-type]
        return "done"

    assert run(1, tmp_path / "store", body) == ["done"]


def test_an_error_of_the_users_own_comes_through(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        ddp = DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        attempt = next(surviving(ddp, optimizer))
        with pytest.raises(ZeroDivisionError), attempt:
            _ = 1 / 0
        return "done"

    assert run(2, tmp_path / "store", body) == ["done"] * 2


@pytest.mark.parametrize(
    ("steps", "told", "verdict"),
    [
        (4, [(4, True), (4, True)], StepDecision.STEP),
        (4, [(4, True), (4, False)], StepDecision.AGAIN),
        (4, [(4, True), (5, False)], StepDecision.STEP),  # the other one came through the vote
        (5, [(4, True), (5, False)], StepDecision.AGAIN),
        (5, [(4, True), (5, True)], StepDecision.AGAIN),  # who is behind has no gradients of this step yet
        (4, [(4, False)], StepDecision.AGAIN),
    ],
)
def test_the_verdict_after_a_failure(steps: int, told: list[tuple[int, bool]], verdict: StepDecision) -> None:
    assert judge(steps, told)[0] is verdict
