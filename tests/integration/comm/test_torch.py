"""The backend "elastrain" of torch.distributed, in real processes: groups, collectives, DDP, and losses."""

from __future__ import annotations

import datetime
import os
import signal
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elastrain.comm
from elastrain.comm.errors import MemberLost
from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.wire.addresses import MeshConfig
from tests.support.comm_processes import Child, Wire

Body = Callable[[int], Any]


def _start(rank: int, world: int, path: Path, node: str | None = None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names that torch renames; users still use the old ones
    options = bootstrap.Options(node=node, mesh=MeshConfig(transport="tcp", segment_bytes=8 << 20))
    dist.init_process_group(
        "elastrain",
        store=torch._C._distributed_c10d.FileStore(str(path), world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=20),
        pg_options=options,
    )


def run(world: int, path: Path, body: Body, *, nodes: bool = False, expect_killed: tuple[int, ...] = ()) -> list[Any]:
    """Run `body(rank)` in `world` processes that are one process group; returns what each has to say."""

    def member(rank: int) -> Callable[[Wire], None]:
        def act(wire: Wire) -> None:
            _start(rank, world, path, f"node{rank}" if nodes else None)
            said = body(rank)
            wire.say(said)
            dist.destroy_process_group()

        return act

    with ExitStack() as stack:
        children = [stack.enter_context(Child(member(rank))) for rank in range(world)]
        said = [None if rank in expect_killed else child.wire.hear() for rank, child in enumerate(children)]
        codes = [child.join() for child in children]
        assert codes == [-signal.SIGKILL if rank in expect_killed else 0 for rank in range(world)]
        return said


nodes = pytest.mark.parametrize("nodes", [False, True], ids=["one-node", "nodes"])


@nodes
def test_every_call_of_torch_distributed(tmp_path: Path, nodes: bool) -> None:
    world = 3

    def body(rank: int) -> str:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world, "elastrain")
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [6.0] * 5
        for op, wanted in [(dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.PRODUCT, 6.0), (dist.ReduceOp.AVG, 2.0)]:
            tensor = torch.full((2,), float(rank + 1))
            work = dist.all_reduce(tensor, op, async_op=True)
            assert work is not None and work.wait() and work.is_completed()
            assert tensor.tolist() == [wanted] * 2
        counts = torch.tensor([rank, -rank - 1])
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        assert counts.tolist() == [1, -2]
        tensor = torch.full((2, 2), float(rank))
        dist.broadcast(tensor, 1)
        assert tensor.tolist() == [[1.0, 1.0]] * 2
        dist.reduce(tensor, 2)
        assert tensor[0, 0] == (3.0 if rank == 2 else 1.0)
        outs = [torch.empty(rank_ + 1) for rank_ in range(world)]
        dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
        assert [out.tolist() for out in outs] == [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]]
        whole = torch.empty(world, 2)
        dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
        assert whole[:, 0].tolist() == [0.0, 1.0, 2.0]
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.arange(6.0))
        assert part.tolist() == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
        dist.reduce_scatter(part, [torch.full((2,), float(r)) for r in range(world)])
        assert part.tolist() == [3.0 * rank] * 2
        gathered = [torch.empty(1) for _ in range(world)] if rank == 0 else None
        dist.gather(torch.tensor([float(rank)]), gathered)
        assert gathered is None or torch.cat(gathered).tolist() == [0.0, 1.0, 2.0]
        one = torch.empty(1)
        dist.scatter(one, [torch.tensor([float(r * 10)]) for r in range(world)] if rank == 1 else None, src=1)
        assert one.item() == rank * 10
        out = torch.empty(world)
        dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank)
        assert out.tolist() == [rank, 10.0 + rank, 20.0 + rank]
        uneven = torch.empty(2 * world if rank == 0 else world)
        rows = [2, 1, 1]
        dist.all_to_all_single(uneven, torch.full((4,), float(rank)), [rows[rank]] * world, rows)
        assert uneven.tolist() == [float(r) for r in range(world) for _ in range(rows[rank])]
        lists = [torch.empty(1) for _ in range(world)]
        dist.all_to_all(lists, [torch.tensor([float(rank * 10 + r)]) for r in range(world)])
        assert torch.cat(lists).tolist() == [rank, 10.0 + rank, 20.0 + rank]
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": r} for r in range(world)]
        dist.barrier()
        return "done"

    assert run(world, tmp_path / "store", body, nodes=nodes) == ["done"] * world


def test_messages_between_pairs(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        cell = torch.zeros(3)
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=7)
        else:
            assert dist.recv(cell, tag=7) == 0
            assert cell.tolist() == [1.0] * 3
        got = torch.zeros(2)
        ops = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), 1 - rank),
            dist.P2POp(dist.irecv, got, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.tolist() == [1.0 - rank] * 2
        return "done"

    assert run(2, tmp_path / "store", body) == ["done"] * 2


def test_groups_meshes_and_functional_collectives(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 4 and dist.get_rank(group) == rank // 2
        world = dist.group.WORLD
        assert world is not None
        assert functional.all_reduce(torch.ones(3), "sum", world).tolist() == [4.0] * 3
        assert functional.all_gather_tensor(torch.tensor([float(rank)]), 0, world).tolist() == [0.0, 1.0, 2.0, 3.0]
        assert functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, world).item() == 4.0 * rank
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh["inner"].get_group())
        assert tensor.item() == (1.0 if rank < 2 else 5.0)
        sharded = distribute_tensor(torch.arange(8.0), mesh["outer"], [Shard(0)])
        assert sharded.full_tensor().tolist() == list(range(8))
        return "done"

    assert run(4, tmp_path / "store", body) == ["done"] * 4


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def _digest(model: torch.nn.Module) -> list[str]:
    return [float(p.detach().double().sum()).hex() for p in model.parameters()]


@pytest.mark.parametrize("variant", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp_trains_like_the_mean_of_the_gradients(tmp_path: Path, variant: dict[str, bool]) -> None:
    world, steps = 2, 4

    def body(rank: int) -> list[str]:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.01, **variant)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(steps):
            optimizer.zero_grad()
            ddp(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        return _digest(ddp)

    first, second = run(world, tmp_path / "store", body)
    assert first == second
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(_batch(rank, step)).square().mean() / world).backward()
        optimizer.step()
    assert [float.fromhex(x) for x in first] == pytest.approx([float.fromhex(x) for x in _digest(model)], rel=1e-5)


def test_ddp_with_uneven_inputs_unused_parameters_and_a_hook(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        model = _model()
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with ddp.join():
            for step in range(2 + rank):
                optimizer.zero_grad()
                ddp(_batch(rank, step)).square().mean().backward()
                optimizer.step()
        return _digest(ddp)

    first, second = run(2, tmp_path / "store", body)
    assert first == second


def test_fsdp_shards_train_like_one_and_are_written_and_read(tmp_path: Path) -> None:
    def body(rank: int) -> list[float]:
        model = _model()
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        sums = [float(p.full_tensor().double().sum()) for p in model.parameters()]  # type: ignore[attr-defined]
        state = model.state_dict()
        saver.save(state, checkpoint_id=str(tmp_path / "checkpoint"))
        for parameter in model.parameters():
            parameter.data.zero_()
        loader.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
        model.load_state_dict(state)
        again = [float(p.full_tensor().double().sum()) for p in model.parameters()]  # type: ignore[attr-defined]
        assert again == sums
        return sums

    first, second = run(2, tmp_path / "store", body)
    assert first == second
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(_batch(rank, step)).square().mean() / 2).backward()
        optimizer.step()
    assert first == pytest.approx([float(p.detach().double().sum()) for p in model.parameters()], rel=1e-4)


@nodes
def test_a_wrapped_ddp_goes_on_after_a_loss_in_backward(tmp_path: Path, nodes: bool) -> None:
    def body(rank: int) -> list[str]:
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.01)
        group = dist.new_group([0, 1, 2])
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for step in range(6):
            if step == 3:
                if rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                # The other survivor may have gone on to its next view before this one has seen the loss.
                with pytest.raises(RuntimeError, match=r"MemberLost|Aborted: .* went on to a newer view"):
                    ddp(_batch(rank, step)).square().mean().backward()
                before = dist.group.WORLD
                elastrain.comm.reconfigure(None, [0, 2])
                assert dist.group.WORLD is before
                assert (dist.get_world_size(), dist.get_rank()) == (2, rank // 2)
                assert dist.get_process_group_ranks(group) == [0, 1]
            optimizer.zero_grad()
            ddp(_batch(rank, step)).square().mean().backward()
            optimizer.step()
        return _digest(ddp)

    first, _, third = run(3, tmp_path / "store", body, nodes=nodes, expect_killed=(1,))
    assert first == third


def test_a_waiter_gets_the_named_error_and_the_future_fails_too(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(MemberLost):
            dist.all_reduce(torch.ones(3))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(RuntimeError, match="MemberLost"):
            future.wait()
        assert isinstance(work.exception(), MemberLost) and not work.is_success()
        return "done"

    assert run(2, tmp_path / "store", body, expect_killed=(1,))[0] == "done"


def test_what_is_not_offered_is_refused_in_words(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        with pytest.raises(ValueError, match="to_dense"):
            dist.all_reduce(torch.ones(3).to_sparse())
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_gather_into_tensor(torch.empty(4, 2).t(), torch.ones(4))
        return "done"

    # Of several ranks the last ones would hear of the first one's refusal, as an abort.
    assert run(1, tmp_path / "store", body) == ["done"]
