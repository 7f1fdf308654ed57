"""What any backend of torch.distributed has to do, as functions of (rank, world): run by `test_torch_contract`.

Values are small integers, so that every dtype holds the exact result and nothing is compared by tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from docs import reductions

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
ORDERED = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


def check(act: Check) -> Check:
    CHECKS[act.__name__] = act
    return act


def given(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank puts in: 1 to 4, different by rank and place."""
    return ((torch.arange(numel) + rank) % 4 + 1).to(dtype)


def combined(world: int, numel: int, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    total = given(0, numel, dtype)
    for rank in range(1, world):
        total = _COMBINE[op](total, given(rank, numel, dtype))
    return total


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), f"{found} where {wanted} was expected"


def _all_reduce(world: int, rank: int, dtypes: tuple[torch.dtype, ...], ops: tuple[Any, ...]) -> None:
    for dtype in dtypes:
        for op in ops:
            for numel in (1, 100, 20_000):
                tensor = given(rank, numel, dtype)
                dist.all_reduce(tensor, op)
                same(tensor, combined(world, numel, dtype, op))


@check
def all_reduce_of_floats(rank: int, world: int) -> None:
    _all_reduce(world, rank, FLOATS, ORDERED)


@check
def all_reduce_of_integers(rank: int, world: int) -> None:
    _all_reduce(world, rank, INTS, ORDERED + BITWISE)


@check
def all_reduce_of_booleans(rank: int, world: int) -> None:
    for op, wanted in ((dist.ReduceOp.SUM, True), (dist.ReduceOp.MAX, True), (dist.ReduceOp.MIN, False)):
        tensor = torch.tensor([rank == 1, True, False])
        dist.all_reduce(tensor, op)
        same(tensor, torch.tensor([wanted, True, False]))


@check
def all_reduce_of_complex_numbers(rank: int, world: int) -> None:
    tensor = torch.complex(given(rank, 50), given(rank + 1, 50))
    dist.all_reduce(tensor)
    same(tensor.real, combined(world, 50, torch.float32))


@check
def average(rank: int, world: int) -> None:
    for dtype in FLOATS:
        tensor = torch.full((7,), float(3 * rank), dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, torch.full((7,), 3.0 * (world - 1) / 2, dtype=dtype))


def _entering(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Powers of two of which three ranks have an average without a remainder."""
    return torch.tensor([[1, 2, 4, 1, 1, 4], [1, 2, 1, 4, 1, 4], [1, 2, 1, 1, 4, 4]])[rank].to(dtype)


def _reduced(world: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The reduction by torch alone, in one process."""
    if dtype is torch.bool:  # all that enters is True
        return torch.full((6,), name != "bxor" or world % 2 == 1)
    parts = torch.stack([_entering(rank, torch.int64) for rank in range(world)])
    integral = not (dtype.is_floating_point or dtype.is_complex)
    wanted = {
        "sum": parts.sum(0),
        "avg": parts.sum(0) // world if integral else parts.sum(0).double() / world,
        "min": parts.amin(0),
        "max": parts.amax(0),
        "prod": parts.prod(0),
        "premul_sum": parts.sum(0).double() * 0.5,
    }
    if name in wanted:
        return wanted[name].to(dtype)
    bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[name]
    total = parts[0]
    for part in parts[1:]:
        total = bits(total, part)
    return total.to(dtype)


def _by_each_collective(rank: int, world: int, dtype: torch.dtype, op: Any) -> dict[str, torch.Tensor]:
    """Return the result of each collective with a reduction on this rank."""
    mine = [_entering(rank, dtype) for _ in range(6)]
    dist.all_reduce(mine[0], op)
    dist.reduce(mine[1], 0, op)
    scattered, single = torch.empty_like(mine[2][:2]), torch.empty_like(mine[3][:2])
    dist.reduce_scatter(scattered, list(mine[2].chunk(world)), op)
    dist.reduce_scatter_tensor(single, mine[3], op)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(mine[4], op)
        dist.all_reduce(mine[5], op)
    found = {"all_reduce": mine[0], "coalesced 0": mine[4], "coalesced 1": mine[5]}
    found |= {"reduce": mine[1]} if rank == 0 else {}
    return found | {"reduce_scatter": scattered, "reduce_scatter_tensor": single}


@check
def every_reduction_of_the_table(rank: int, world: int) -> None:
    """Each pair of reduction and dtype that the pages say, by each collective, as torch computes it on one process."""
    gloo = dist.get_backend() == "gloo"
    names = {"prod": "PRODUCT"}
    for kind, dtypes in reductions.KINDS.items():
        for name in reductions.COLUMNS:
            taken = reductions.GLOO.get(kind, ()) if gloo else reductions.COLUMNS
            for dtype in dtypes:
                if name not in taken or not reductions.is_taken(name, dtype):
                    continue
                if gloo and dtype is torch.complex32 and name == "avg":
                    continue  # by reduce_scatter torch 2.13 cannot
                op = getattr(dist.ReduceOp, names.get(name, name.upper()))
                if name == "premul_sum":
                    op = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
                wanted = _reduced(world, dtype, name)
                for collective, found in _by_each_collective(rank, world, dtype, op).items():
                    right = wanted.chunk(world)[rank] if "scatter" in collective else wanted
                    equal = torch.equal(found.to(torch.complex128), right.to(torch.complex128))  # float8 has no equal
                    assert found.dtype is dtype and equal, f"{collective} {name} of {dtype}: {found}, not {right}"


@check
def gloo_takes_no_other_reduction_than_the_table_says(rank: int, world: int) -> None:
    if dist.get_backend() != "gloo":
        return
    for kind, dtypes in reductions.KINDS.items():
        for name in set(reductions.COLUMNS) - set(reductions.GLOO.get(kind, ())) - {"premul_sum"}:
            for dtype in dtypes:
                op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(name, name.upper()))
                try:
                    dist.all_reduce(_entering(rank, dtype), op)
                except (RuntimeError, ValueError):
                    continue
                raise AssertionError(f"Gloo takes {name} of {dtype}")


@check
def half_precision_is_accumulated_in_float32(rank: int, world: int) -> None:
    for numel in (3, 20_000):
        tensor = torch.full((numel,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)  # 2048 + 1 rounds to 2048
        dist.all_reduce(tensor)
        same(tensor, torch.full((numel,), 2048.0 + world - 1, dtype=torch.float16))


@check
def tensors_without_elements_and_dimensions(rank: int, world: int) -> None:
    nothing, one = torch.empty(0), torch.tensor(float(rank))
    dist.all_reduce(nothing)
    dist.all_reduce(one)
    same(one, torch.tensor(float(sum(range(world)))))


@check
def tensors_that_are_not_contiguous(rank: int, world: int) -> None:
    base = torch.zeros(40, 30)
    view = base.t()[::2]
    view.copy_(given(rank, view.numel()).view(view.shape))
    dist.all_reduce(view)
    same(view.reshape(-1), combined(world, view.numel(), torch.float32))
    assert base[:, 1::2].eq(0).all(), "what lies between the elements was written"


@check
def tensors_that_belong_to_a_graph(rank: int, world: int) -> None:
    leaf = given(rank, 20_000).requires_grad_()
    (gradient,) = torch.autograd.grad((leaf * leaf * leaf).sum(), leaf, create_graph=True)
    wanted = [3 * given(r, 20_000) ** 2 for r in range(world)]
    outs = [torch.empty(20_000) for _ in range(world)]
    dist.all_gather(outs, gradient)
    for r in range(world):
        same(outs[r], wanted[r])
    dist.all_reduce(gradient)
    same(gradient.detach(), torch.stack(wanted).sum(0))
    parameter = torch.nn.Parameter(given(rank, 20_000))
    with torch.no_grad():
        dist.broadcast(parameter, 1)
    same(parameter.detach(), given(1, 20_000))


@check
def broadcast_from_every_rank(rank: int, world: int) -> None:
    for root in range(world):
        for dtype in (*FLOATS, *INTS, torch.bool, torch.complex64):
            tensor = given(rank, 300, torch.float32).to(dtype)
            dist.broadcast(tensor, root)
            same(tensor, given(root, 300, torch.float32).to(dtype))


@check
def reduce_to_every_rank(rank: int, world: int) -> None:
    for root in range(world):
        for op in ORDERED:
            tensor = given(rank, 5000)
            dist.reduce(tensor, root, op)
            if rank == root:
                same(tensor, combined(world, 5000, torch.float32, op))


@check
def all_gather_into_lists_and_tensors(rank: int, world: int) -> None:
    for dtype in (*FLOATS, *INTS, torch.bool):
        for numel in (3, 10_000):
            mine = given(rank, numel, dtype)
            outs = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(outs, mine)
            stacked, joined = mine.new_empty(world, numel), mine.new_empty(world * numel)
            dist.all_gather_into_tensor(stacked, mine)
            dist.all_gather_into_tensor(joined, mine)
            for r in range(world):
                same(outs[r], given(r, numel, dtype))
                same(stacked[r], given(r, numel, dtype))
                same(joined[r * numel : (r + 1) * numel], given(r, numel, dtype))


@check
def all_gather_of_uneven_sizes(rank: int, world: int) -> None:
    outs = [torch.empty(10 * r + 1) for r in range(world)]
    dist.all_gather(outs, given(rank, 10 * rank + 1))
    for r in range(world):
        same(outs[r], given(r, 10 * r + 1))


@check
def reduce_scatter_of_lists_and_tensors(rank: int, world: int) -> None:
    for op in ORDERED:
        whole = given(rank, world * 400)
        wanted = combined(world, world * 400, torch.float32, op).chunk(world)[rank]
        out = torch.empty(400)
        dist.reduce_scatter(out, list(whole.chunk(world)), op)
        same(out, wanted)
        out.zero_()
        dist.reduce_scatter_tensor(out, whole, op)
        same(out, wanted)


@check
def gather_and_scatter_at_every_rank(rank: int, world: int) -> None:
    for root in range(world):
        outs = [torch.empty(20) for _ in range(world)] if rank == root else None
        dist.gather(given(rank, 20), outs, root)
        if outs is not None:
            for r in range(world):
                same(outs[r], given(r, 20))
        out = torch.empty(20)
        dist.scatter(out, [given(10 + r, 20) for r in range(world)] if rank == root else None, root)
        same(out, given(10 + rank, 20))


@check
def all_to_all_even_and_uneven(rank: int, world: int) -> None:
    out = torch.empty(world, 50)
    dist.all_to_all_single(out, torch.stack([given(10 * rank + to, 50) for to in range(world)]))
    for r in range(world):
        same(out[r], given(10 * r + rank, 50))
    rows = [to + 1 for to in range(world)]
    uneven = torch.empty((rank + 1) * world)
    mine = torch.cat([torch.full((to + 1,), float(10 * rank + to)) for to in range(world)])
    dist.all_to_all_single(uneven, mine, [rank + 1] * world, rows)
    same(uneven, torch.cat([torch.full((rank + 1,), float(10 * r + rank)) for r in range(world)]))


@check
def all_to_all_of_lists(rank: int, world: int) -> None:
    outs = [torch.empty(rank + 1) for _ in range(world)]
    dist.all_to_all(outs, [torch.full((to + 1,), float(10 * rank + to)) for to in range(world)])
    for r in range(world):
        same(outs[r], torch.full((rank + 1,), float(10 * r + rank)))


@check
def messages_find_their_tag(rank: int, world: int) -> None:
    right, left = (rank + 1) % world, (rank - 1) % world
    sent = [dist.isend(torch.full((9,), float(10 * rank + tag)), right, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        got = torch.empty(9)
        dist.recv(got, left, tag=tag)
        same(got, torch.full((9,), float(10 * left + tag)))
    for work in sent:
        assert work is not None
        work.wait()


@check
def messages_of_one_tag_keep_their_order(rank: int, world: int) -> None:
    if rank == 0:
        for number in range(5):
            dist.send(torch.tensor([float(number)]), 1, tag=4)
    elif rank == 1:
        got = [torch.empty(1) for _ in range(5)]
        for tensor in got:
            dist.recv(tensor, 0, tag=4)
        assert [tensor.item() for tensor in got] == list(range(5))


@check
def messages_from_anybody(rank: int, world: int) -> None:
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=6)
        return
    found = {}
    for _ in range(world - 1):
        got = torch.empty(1)
        source = dist.recv(got, tag=6)
        found[source] = got.item()
    assert found == {r: float(r) for r in range(1, world)}


@check
def messages_in_a_batch(rank: int, world: int) -> None:
    got = torch.empty(30_000)
    operations = [
        dist.P2POp(dist.isend, given(rank, 30_000), (rank + 1) % world),
        dist.P2POp(dist.irecv, got, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got, given((rank - 1) % world, 30_000))


@check
def operations_begun_together_run_in_their_order(rank: int, world: int) -> None:
    tensor, works = torch.ones(10_000), []
    for _ in range(4):
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(dist.broadcast(tensor, world - 1, async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
    same(tensor, torch.full((10_000,), float(world**4)))


@check
def futures_are_done_with_their_work(rank: int, world: int) -> None:
    tensor = given(rank, 200)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    (found,) = work.get_future().wait()
    same(found, combined(world, 200, torch.float32))
    assert found.data_ptr() == tensor.data_ptr()


@check
def many_tensors_at_once(rank: int, world: int) -> None:
    tensors = [given(rank, numel) for numel in (1, 70, 9000)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        same(tensor, combined(world, tensor.numel(), torch.float32))


@check
def all_gather_of_many_tensors_at_once(rank: int, world: int) -> None:
    tensors = [given(rank, 30), given(rank, 4)]
    outs = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(world)]
    dist.all_gather_coalesced(outs, tensors)
    for r in range(world):
        same(outs[r][0], given(r, 30))
        same(outs[r][1], given(r, 4))


@check
def objects(rank: int, world: int) -> None:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank * 1000})
    assert [one["rank"] for one in found] == list(range(world))
    told: list[Any] = [("from", 1)] if rank == 1 else [None]
    dist.broadcast_object_list(told, 1)
    assert told == [("from", 1)]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"to {r}" for r in range(world)] if rank == 0 else None, 0)
    assert got == [f"to {rank}"]
    gathered: list[Any] | None = [None] * world if rank == 2 else None
    dist.gather_object(rank, gathered, 2)
    assert gathered is None or gathered == list(range(world))


@check
def groups_of_some_in_their_own_order(rank: int, world: int) -> None:
    pair, others = dist.new_group([0, 2]), dist.new_group([1, 2])
    for group, ranks in ((pair, [0, 2]), (others, [1, 2])):
        if rank in ranks:
            assert (dist.get_rank(group), dist.get_world_size(group)) == (ranks.index(rank), 2)
            assert dist.get_process_group_ranks(group) == ranks
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
            dist.broadcast(tensor, ranks[1], group=group)
    assert dist.get_rank(pair) == (-1 if rank == 1 else rank // 2)


@check
def functional_forms(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    same(functional.all_reduce(given(rank, 60), "sum", group), combined(world, 60, torch.float32))
    gathered = functional.all_gather_tensor(given(rank, 6), 0, group)
    same(gathered, torch.cat([given(r, 6) for r in range(world)]))
    part = functional.reduce_scatter_tensor(given(rank, 6 * world), "sum", 0, group)
    same(part, combined(world, 6 * world, torch.float32).chunk(world)[rank])
    same(functional.broadcast(given(rank, 8), 1, group), given(1, 8))


@check
def barriers(rank: int, world: int) -> None:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
