"""Newcomers of a torch job: taken in by `reconfigure`, in place, while others are lost."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elastrain.comm
from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.wire.addresses import MeshConfig
from tests.integration.comm.test_torch import _batch, _digest, _model
from tests.support.comm_processes import Child, Wire

SECRET = b"j" * 32
Body = Callable[[Wire], Any]


PATIENCE_S = 30.0
"""Nobody is late: on a busy machine a process that is there may not come to answer for a second, or for several."""


def _begin(rank: int, world: int, path: Path | None, node: str | None, patience_s: float) -> None:
    torch.set_num_threads(1)
    times = {"connect_timeout_s": patience_s, "handshake_timeout_s": patience_s}
    mesh = MeshConfig(transport="tcp", segment_bytes=8 << 20, **times)
    options = bootstrap.Options(node=node, secret=SECRET, mesh=mesh)
    store = (
        torch._C._distributed_c10d.HashStore()
        if path is None
        else torch._C._distributed_c10d.FileStore(str(path), world)
    )
    dist.init_process_group(
        "elastrain",
        store=store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=20),
        pg_options=options,
    )


class Stage:
    """Members of one job, each running a body that says and hears JSON; `old` of them begin as one group.

    `patience_s`: how long one that does not come is waited for, twice.
    """

    def __init__(
        self, path: Path, *, old: list[Body], new: list[Body], nodes: bool = False, patience_s: float = PATIENCE_S
    ) -> None:
        self._stack = ExitStack()
        self._bodies: list[tuple[Body, int, int, Path | None]]
        self._bodies = [(body, rank, len(old), path / "store") for rank, body in enumerate(old)]
        self._bodies += [(body, 0, 1, None) for body in new]
        self._nodes, self._patience_s = nodes, patience_s

    def __enter__(self) -> list[Child]:
        return [self._stack.enter_context(Child(self._member(number))) for number in range(len(self._bodies))]

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _member(self, number: int) -> Callable[[Wire], None]:
        body, rank, world, path = self._bodies[number]

        def act(wire: Wire) -> None:
            _begin(rank, world, path, f"node{number}" if self._nodes else None, self._patience_s)
            wire.say(elastrain.comm.handle())
            wire.say(body(wire))
            dist.destroy_process_group()

        return act


def _sum() -> float:
    tensor = torch.ones(30_000)
    dist.all_reduce(tensor)
    return float(tensor[-1])


def _sum_for_ever() -> None:
    while True:
        _sum()


nodes = pytest.mark.parametrize("nodes", [False, True], ids=["one-node", "nodes"])


@nodes
def test_newcomers_are_taken_in_by_the_same_group_and_torch_agrees(tmp_path: Path, nodes: bool) -> None:
    def use_all() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        sharded = distribute_tensor(torch.arange(8.0), mesh["inner"], [Shard(0)])
        halves = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        mine = halves[0 if dist.get_rank() in (0, 3) else 1]
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=mine)
        return {
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "ranks": dist.get_process_group_ranks(dist.group.WORLD),
            "sum": _sum(),
            "whole": sharded.full_tensor().tolist(),
            "half": tensor.item(),
        }

    def old(wire: Wire) -> Any:
        kept = dist.new_group([0, 1])
        before = dist.group.WORLD
        assert _sum() == 2
        wire.say(elastrain.comm.handle())
        elastrain.comm.reconfigure(before, [1, 0, *wire.hear()])
        assert dist.group.WORLD is before
        assert dist.get_process_group_ranks(kept) == [1, 0]  # its order is its own, the ranks are the new ones
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=kept)
        assert tensor.item() == 2
        return use_all()

    def new(wire: Wire) -> Any:
        elastrain.comm.reconfigure(None, wire.hear())
        return use_all()

    with Stage(tmp_path, old=[old, old], new=[new, new], nodes=nodes) as children:
        handles = [child.wire.hear() for child in children]
        first, second = (child.wire.hear() for child in children[:2])  # a group was made since
        for child in children[:2]:
            child.wire.say(handles[2:])
        for child in children[2:]:
            child.wire.say([second, first, *handles[2:]])
        said = [child.wire.hear() for child in children]
        assert [s["rank"] for s in said] == [1, 0, 2, 3]
        for s in said:
            assert (s["size"], s["ranks"], s["sum"]) == (4, [0, 1, 2, 3], 4.0)
            assert s["whole"] == list(range(8)) and s["half"] == 3.0
        assert [child.join() for child in children] == [0] * 4


@nodes
def test_a_join_during_a_loss_and_a_loss_during_a_join_end_in_the_view_of_who_is_left(
    tmp_path: Path, nodes: bool
) -> None:
    """Of three, one dies; a newcomer that should replace it dies before it comes; a second one does come."""

    def old(wire: Wire) -> Any:
        with pytest.raises((MemberLost, Aborted)):  # Aborted: the other survivor saw the loss first, and went on
            _sum_for_ever()
        with pytest.raises(CommError):  # the first newcomer is dead by now
            elastrain.comm.reconfigure(None, [0, 1, wire.hear()])
        assert dist.get_world_size() == 3
        wire.say(elastrain.comm.handle())  # it tells the newcomer how many views there have been
        elastrain.comm.reconfigure(None, [*wire.hear(), 1, 0])
        return [dist.get_rank(), dist.get_world_size(), _sum()]

    def victim(wire: Wire) -> Any:
        assert wire.hear() == "die"
        os.kill(os.getpid(), signal.SIGKILL)

    def new(wire: Wire) -> Any:
        elastrain.comm.reconfigure(None, wire.hear())
        return [dist.get_rank(), dist.get_world_size(), _sum()]

    with Stage(tmp_path, old=[old, old, victim], new=[victim, new], nodes=nodes, patience_s=2.0) as children:
        handles = [child.wire.hear() for child in children]
        for child in children[2:4]:
            child.wire.say("die")
            assert child.join() == -signal.SIGKILL
        for child in children[:2]:
            child.wire.say(handles[3])
        first, second = (child.wire.hear() for child in children[:2])
        for child in children[:2]:
            child.wire.say([handles[4]])
        children[4].wire.say([handles[4], second, first])
        said = [children[number].wire.hear() for number in (0, 1, 4)]
        assert said == [[2, 3, 3.0], [1, 3, 3.0], [0, 3, 3.0]]


def test_a_model_trained_on_with_a_newcomer_has_equal_replicas(tmp_path: Path) -> None:
    def train(ddp: DistributedDataParallel, first: int) -> list[str]:
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(first, first + 3):
            for attempt in elastrain.comm.surviving(ddp, optimizer):
                with attempt:
                    optimizer.zero_grad()
                    ddp(_batch(dist.get_rank(), step)).square().mean().backward()
        return _digest(ddp)

    def old(wire: Wire) -> Any:
        model = _model()
        train(DistributedDataParallel(model), 0)
        wire.say(elastrain.comm.handle())
        elastrain.comm.reconfigure(None, [0, 1, wire.hear()])
        return [train(DistributedDataParallel(model), 3), bootstrap.session().steps]

    def new(wire: Wire) -> Any:
        elastrain.comm.reconfigure(None, wire.hear())
        return [train(DistributedDataParallel(_model()), 3), bootstrap.session().steps]

    with Stage(tmp_path, old=[old, old], new=[new]) as children:
        handles = [child.wire.hear() for child in children]
        fresh = [child.wire.hear() for child in children[:2]]
        for child in children[:2]:
            child.wire.say(handles[2])
        children[2].wire.say([*fresh, handles[2]])
        first, second, third = (child.wire.hear() for child in children)
        assert first == second == third and first[1] == 6


def test_a_monitored_barrier_names_the_missing_ranks(tmp_path: Path) -> None:
    def old(wire: Wire) -> Any:
        elastrain.comm.monitored_barrier()
        rank = dist.get_rank()
        if rank in (1, 3):
            wire.hear()
            return None
        try:
            elastrain.comm.monitored_barrier(timeout=datetime.timedelta(seconds=0.2 if rank == 0 else 10))
        except (Timeout, Aborted) as error:
            return [type(error).__name__, str(error)]

    with Stage(tmp_path, old=[old] * 4, new=[]) as children:
        for child in children:
            child.wire.hear()
        said = [children[0].wire.hear(), children[2].wire.hear()]
        assert said[0][0] == "Timeout" and "rank 1, 3 did not come" in said[0][1]
        assert said[1][0] == "Aborted" and "rank00001" in said[1][1] and "rank00003" in said[1][1]
        for number in (1, 3):
            children[number].wire.say("end")


def test_a_groups_own_timeout_ends_its_calls(tmp_path: Path) -> None:
    def old(wire: Wire) -> Any:
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.2))
        if dist.get_rank() == 1:
            return wire.hear()
        with pytest.raises(Timeout, match=r"nothing from rank00001-\w+ within 0\.2 s"):
            dist.barrier(group)
        return "timed out"

    with Stage(tmp_path, old=[old] * 2, new=[]) as children:
        for child in children:
            child.wire.hear()
        assert children[0].wire.hear() == "timed out"
        children[1].wire.say("end")


def test_what_can_not_be_reconfigured_is_named(tmp_path: Path) -> None:
    def old(wire: Wire) -> Any:
        group = dist.new_group([0])
        with pytest.raises(ValueError, match="only the default group is reconfigured"):
            elastrain.comm.reconfigure(group, [0])
        with pytest.raises(ValueError, match="below 1; got 4"):
            elastrain.comm.reconfigure(None, [0, 4])
        with pytest.raises(ValueError, match=r"expected what elastrain\.comm\.handle\(\) gave"):
            elastrain.comm.reconfigure(None, [0, "[1, 2]"])
        with pytest.raises(ValueError, match="names every member once"):
            elastrain.comm.reconfigure(None, [])
        return _sum()

    with Stage(tmp_path, old=[old], new=[]) as (child,):
        child.wire.hear()
        assert child.wire.hear() == 1.0
