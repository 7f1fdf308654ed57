"""Collectives of several communicators, one per thread of this process, over every transport."""

from __future__ import annotations

import threading
import time
from typing import get_args

import pytest
import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import Reduction
from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.wire.addresses import Frame, Peer
from tests.support.comm_tools import Transport
from tests.support.party import NAMES, party

pytestmark = pytest.mark.parametrize("transport", get_args(Transport))


def _inputs(world: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel * world)
    if dtype.is_floating_point:
        return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]
    return [torch.randint(0, 100, (numel,), generator=generator).to(dtype) for _ in range(world)]


def _expected(inputs: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The documented tree, written out plainly."""
    dtype = inputs[0].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    sums = [i.float() if half else i.clone() for i in inputs]
    for left, right in algorithms.tree(len(inputs)):
        a, b = sums[left], sums[right]
        if reduction in ("sum", "avg"):
            sums[left] = a + b
        elif reduction == "prod":
            sums[left] = a * b
        elif reduction == "min":
            sums[left] = torch.minimum(a, b)
        elif reduction == "max":
            sums[left] = torch.maximum(a, b)
        else:
            sums[left] = {"band": a.__and__, "bor": a.__or__, "bxor": a.__xor__}[reduction](b)
    result = sums[0] / len(inputs) if reduction == "avg" else sums[0]
    return result.to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 1000, 100_001])
@pytest.mark.parametrize("shared", [False, True], ids=["ordinary", "shared"])
def test_all_reduce_is_the_documented_sum_bit_for_bit(
    transport: Transport, world: int, numel: int, shared: bool
) -> None:
    with party(transport, world) as made:
        inputs = _inputs(world, numel, torch.float32)

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            tensor = comm.empty(numel, torch.float32) if shared else torch.empty(numel)
            tensor.copy_(inputs[rank])
            comm.world.all_reduce(tensor).wait()
            result = tensor.clone()
            tensor.fill_(-1)  # allowed at once: peers must not see it
            return result

        for _ in range(2):
            for result in made.each(act):
                assert torch.equal(result, _expected(inputs, "sum"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("numel", [40, 60_000])
def test_all_reduce_of_every_dtype(transport: Transport, dtype: torch.dtype, numel: int) -> None:
    with party(transport, 3) as made:
        inputs = _inputs(3, numel, dtype)
        tensors = [tensor.clone() for tensor in inputs]
        made.each(lambda comm, rank: comm.world.all_reduce(tensors[rank]).wait())
        assert all(torch.equal(tensor, _expected(inputs, "sum")) for tensor in tensors)


@pytest.mark.parametrize("reduction", ["avg", "min", "max", "prod", "band", "bor", "bxor"])
def test_every_reduction(transport: Transport, reduction: Reduction) -> None:
    dtype = torch.int32 if reduction.startswith("b") else torch.float32
    _check_reduction(transport, reduction, dtype)


def test_the_average_of_integers(transport: Transport) -> None:
    _check_reduction(transport, "avg", torch.int64)


def _check_reduction(transport: Transport, reduction: Reduction, dtype: torch.dtype) -> None:
    with party(transport, 4) as made:
        for numel in (10, 20_000):
            inputs = _inputs(4, numel, dtype)
            tensors = [tensor.clone() for tensor in inputs]
            made.each(lambda comm, rank: comm.world.all_reduce(tensors[rank], reduction).wait())  # noqa: B023
            assert all(torch.equal(tensor, _expected(inputs, reduction)) for tensor in tensors)


@pytest.mark.parametrize("side", [10, 300])
def test_tensors_that_are_not_contiguous(transport: Transport, side: int) -> None:
    with party(transport, 2) as made:
        inputs = [torch.randn(side, side) for _ in range(2)]
        tensors = [tensor.clone() for tensor in inputs]
        made.each(lambda comm, rank: comm.world.all_reduce(tensors[rank].t()).wait())
        assert all(torch.equal(tensor, inputs[0] + inputs[1]) for tensor in tensors)
        made.each(lambda comm, rank: comm.world.broadcast(tensors[rank][:, ::2], root=1).wait())
        assert torch.equal(tensors[0][:, ::2], tensors[1][:, ::2])


@pytest.mark.parametrize("numel", [0, 5, 100_000])
def test_broadcast_and_all_gather(transport: Transport, numel: int) -> None:
    with party(transport, 3) as made:
        inputs = _inputs(3, numel, torch.float32)

        def act(comm: Communicator, rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
            told, mine = inputs[rank].clone(), inputs[rank].clone()
            outs = [torch.empty(numel) for _ in range(3)]
            comm.world.broadcast(told, root=2).wait()
            comm.world.all_gather(outs, mine).wait()
            mine.fill_(-1)
            return told, outs

        for told, outs in made.each(act):
            assert torch.equal(told, inputs[2])
            assert all(torch.equal(out, given) for out, given in zip(outs, inputs, strict=True))


@pytest.mark.parametrize("numel", [0, 3, 30_000])
def test_gather_scatter_and_all_to_all(transport: Transport, numel: int) -> None:
    with party(transport, 3) as made:

        def given(rank: int, to: int) -> torch.Tensor:
            return torch.full((numel + to,), 10.0 * rank + to)  # uneven on purpose

        def act(comm: Communicator, rank: int) -> list[torch.Tensor]:
            scattered, gathered = torch.empty(numel + rank), [torch.empty(numel + r) for r in range(3)]
            exchanged = [torch.empty(numel + rank) for _ in range(3)]
            gives = [given(rank, to) for to in range(3)]
            comm.world.scatter(scattered, gives if rank == 1 else None, root=1).wait()
            comm.world.gather(gathered if rank == 2 else None, scattered, root=2).wait()
            comm.world.all_to_all(exchanged, gives).wait()
            for tensor in gives:
                tensor.fill_(-1)
            if rank == 2:
                assert all(torch.equal(gathered[r], given(1, r)) for r in range(3))
            return [scattered, *exchanged]

        for rank, found in enumerate(made.each(act)):
            assert all(torch.equal(a, b) for a, b in zip(found, [given(r, rank) for r in (1, 0, 1, 2)], strict=True))


@pytest.mark.parametrize("numel", [1, 1000, 50_000])
def test_reduce_and_reduce_scatter_use_the_same_tree(transport: Transport, numel: int) -> None:
    with party(transport, 4) as made:
        inputs = _inputs(4, 4 * numel, torch.float32)
        total = _expected(inputs, "sum")

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            reduced, out = inputs[rank].clone(), torch.empty(numel)
            comm.world.reduce(reduced, root=3).wait()
            assert torch.equal(reduced, total if rank == 3 else inputs[rank])
            pieces = list(inputs[rank].clone().chunk(4))
            comm.world.reduce_scatter(out, pieces).wait()
            pieces[0].fill_(-1)
            return out

        assert torch.equal(torch.cat(made.each(act)), total)


def test_tagged_messages_arrive_in_order_per_tag_and_from_anybody(transport: Transport) -> None:
    with party(transport, 3) as made:

        def act(comm: Communicator, rank: int) -> list[float]:
            world, cells = comm.world, [torch.zeros(1) for _ in range(6)]
            if rank == 0:
                for number in range(4):
                    tensor = torch.tensor([float(number)])
                    world.send(tensor, 1, tag=number % 2)
                    tensor.fill_(-1)
                world.send(torch.full((50_000,), 7.0), 0).wait()
                large = torch.zeros(50_000)
                world.recv(large, 0).wait()
                return [large.sum().item()]
            if rank == 2:
                world.send(torch.tensor([9.0]), 1, tag=5).wait()
                return []
            odd = [world.recv(cell, 0, tag=1) for cell in cells[:2]]
            even = [world.recv(cell, 0, tag=0) for cell in cells[2:4]]
            anybody = world.recv(cells[4], tag=5)
            for work in (*even, *odd, anybody):
                work.wait()
            assert anybody.source == "c"
            return [cell.item() for cell in cells[:5]]

        assert made.each(act) == [[350_000.0], [1.0, 3.0, 0.0, 2.0, 9.0], []]


def test_a_message_that_does_not_fit_or_never_comes_is_named(transport: Transport) -> None:
    with party(transport, 2) as made:

        def act(comm: Communicator, rank: int) -> None:
            if rank == 0:
                comm.world.send(torch.ones(3), 1).wait()
            else:
                with pytest.raises(ValueError, match=r"float32\[3\] came from 'a', torch.float32\[2\] was awaited"):
                    comm.world.recv(torch.ones(2), 0).wait()
                comm.world.recv(torch.ones(2), 0, tag=4, timeout_s=0.1).wait()

        _, second = made.each(act)
        assert isinstance(second, Timeout) and "nothing tagged 4 from a within 0.1 s" in str(second)


def test_sizes_that_do_not_fit_are_named(transport: Transport) -> None:
    with party(transport, 2) as made:

        def act(comm: Communicator, rank: int) -> None:
            outs = [torch.empty(2), torch.empty(2)]
            comm.world.all_gather(outs, torch.ones(2 + rank)).wait()

        assert any("float32[2] wanted from rank 1, float32[3] given" in str(error) for error in made.each(act))


def test_nobody_passes_a_barrier_before_all_have_come(transport: Transport) -> None:
    with party(transport, 4) as made:
        for late in range(4):
            came: list[int] = []
            others_came = threading.Semaphore(0)

            def act(
                comm: Communicator,
                rank: int,
                late: int = late,
                came: list[int] = came,
                others_came: threading.Semaphore = others_came,
            ) -> int:
                if rank == late:
                    assert all(others_came.acquire(timeout=20) for _ in range(3))
                came.append(rank)
                work = comm.world.barrier()
                others_came.release()
                work.wait()
                return len(came)

            assert made.each(act) == [4, 4, 4, 4]


def test_operations_run_in_order_beside_the_caller(transport: Transport) -> None:
    with party(transport, 3) as made:

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            tensor = torch.full((30_000,), float(rank + 1))
            works = [comm.world.all_reduce(tensor) for _ in range(5)]
            for work in works:
                work.wait()
            return tensor

        assert all(torch.equal(t, torch.full((30_000,), 6.0 * 3**4)) for t in made.each(act))


def test_groups_overlap_and_cost_nothing(transport: Transport) -> None:
    with party(transport, 4) as made:
        lists = {"left": "ab", "right": "cd", "cross": "ad", "three": "bcd"}

        def act(comm: Communicator, rank: int) -> dict[str, float]:
            found = {}
            for name, members in lists.items():
                if NAMES[rank] in members:
                    group = comm.group(name, list(members))
                    tensor = torch.tensor([float(10**rank)])
                    group.all_reduce(tensor).wait()
                    found[name] = tensor.item()
            return found

        assert made.each(act) == [
            {"left": 11, "cross": 1001},
            {"left": 11, "three": 1110},
            {"right": 1100, "three": 1110},
            {"right": 1100, "cross": 1001, "three": 1110},
        ]


def test_a_lost_member_ends_every_waiter_and_an_edit_makes_all_groups_whole(transport: Transport) -> None:
    with party(transport, 4) as made:
        groups = made.each(lambda comm, rank: comm.group("all", list("abcd")))
        made.each(lambda comm, rank: comm.world.barrier().wait())

        def act(comm: Communicator, rank: int) -> None:
            if rank == 3:
                comm.close()
            else:
                comm.world.all_reduce(torch.ones(50_000)).wait()

        results = made.each(act)
        assert all(isinstance(r, MemberLost) and r.member == "d" for r in results[:3])
        again = made.each(lambda comm, rank: comm.world.barrier().wait(), "abc")
        assert all(isinstance(r, MemberLost) for r in again)

        del made.comms["d"]
        made.view(2, "abc")
        ones = [torch.ones(50_000) for _ in range(3)]
        made.each(lambda comm, rank: comm.world.all_reduce(ones[rank]).wait())
        assert made.each(lambda comm, rank: groups[rank].barrier().wait()) == [None] * 3
        assert all(torch.equal(one, torch.full((50_000,), 3.0)) for one in ones)
        assert groups[0].members == ("a", "b", "c") and (groups[2].rank, groups[2].size) == (2, 3)

        made.add("e")
        made.view(3, "cabe")
        assert made.comms["c"].world.rank == 0
        values = [torch.ones(1) for _ in range(4)]
        made.each(lambda comm, rank: comm.world.all_reduce(values[rank]).wait())
        assert values == [torch.tensor([4.0])] * 4


def test_who_is_done_may_go_on_to_the_next_view_without_disturbing_those_who_are_not(transport: Transport) -> None:
    with party(transport, 3) as made:
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in "abc"]

        def act(comm: Communicator, rank: int) -> None:
            for generation in range(2, 40):
                comm.world.all_reduce(torch.ones(20_000)).wait()
                comm.edit(generation, peers)
                comm.world.barrier().wait()

        assert made.each(act) == [None] * 3


def test_who_closes_is_still_heard_out(transport: Transport) -> None:
    with party(transport, 2) as made:

        def act(comm: Communicator, rank: int) -> bool:
            tensor = torch.full((5_000_000,), float(rank))
            comm.world.broadcast(tensor, root=1).wait()
            if rank == 1:
                comm.close()
            return bool((tensor == 1).all())

        assert made.each(act) == [True, True]


def test_who_awaits_somebody_that_is_in_a_newer_view_fails_at_once(transport: Transport) -> None:
    with party(transport, 3) as made:
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in "abc"]

        def act(comm: Communicator, rank: int) -> None:
            if rank == 2:
                comm.edit(2, peers)
            else:
                comm.world.all_reduce(torch.ones(10)).wait()

        first, second, _ = made.each(act)
        assert all(
            isinstance(error, Aborted) and "'c' went on to a newer view" in error.reason for error in (first, second)
        )


def test_who_leaves_after_its_part_is_done_spoils_nothing_but_is_missed_afterwards(transport: Transport) -> None:
    with party(transport, 4) as made:
        all_have_summed = threading.Barrier(3)

        def act(comm: Communicator, rank: int) -> float:
            tensor = torch.full((2_000_000,), float(rank))
            comm.world.all_reduce(tensor).wait()
            comm.world.barrier().wait()
            if rank == 3:
                comm.close()
                return float(tensor[-1])
            comm.group("three", list("abc")).all_reduce(tensor).wait()
            all_have_summed.wait(20)
            with pytest.raises(MemberLost, match="'d' is lost: it left"):
                comm.world.barrier().wait()
            return float(tensor[-1])

        assert made.each(act) == [18.0, 18.0, 18.0, 6.0]


def test_an_abort_reaches_every_waiter(transport: Transport) -> None:
    with party(transport, 3) as made:

        def act(comm: Communicator, rank: int) -> None:
            if rank == 2:
                comm.abort("the operator said so")
            comm.world.barrier().wait()

        for result in made.each(act):
            assert isinstance(result, Aborted) and "the operator said so" in result.reason
        made.view(2, "abc")
        assert made.each(lambda comm, rank: comm.world.barrier().wait()) == [None] * 3


def test_a_deadline_names_who_is_missing_and_ends_the_others_too(transport: Transport) -> None:
    with party(transport, 3) as made:

        def act(comm: Communicator, rank: int) -> None:
            if rank == 0:
                comm.world.all_reduce(torch.ones(10), timeout_s=0.5).wait()
            elif rank == 1:
                comm.world.all_reduce(torch.ones(10)).wait()

        made.each(lambda comm, rank: comm.world.barrier().wait())  # the links are made
        first, second, _ = made.each(act)
        assert isinstance(first, Timeout) and "nothing from c within 0.5 s" in str(first)
        assert isinstance(second, Aborted) and "nothing from c" in second.reason


def test_members_that_disagree_are_told_how(transport: Transport) -> None:
    with party(transport, 2) as made:
        results = made.each(lambda comm, rank: comm.world.all_reduce(torch.ones(10 + rank)).wait())
        assert all(isinstance(r, Aborted) for r in results)
        assert any("float32[10]" in str(r) and "float32[11]" in str(r) for r in results)


def test_misuse_is_named_and_does_not_leave_the_others_waiting(transport: Transport) -> None:
    with party(transport, 2) as made:

        def act(comm: Communicator, rank: int) -> None:
            tensor = torch.ones(4) if rank else torch.ones(4, dtype=torch.complex64)
            comm.world.all_reduce(tensor, "max").wait()

        first, second = made.each(act)
        assert isinstance(first, ValueError) and "complex numbers have no max" in str(first)
        assert isinstance(second, Aborted) and "'a' could not begin" in second.reason
        with pytest.raises(ValueError, match="below 2; got 2"):
            made.comms["a"].world.broadcast(torch.ones(1), root=2)
        with pytest.raises(ValueError, match="list every member once"):
            made.comms["a"].group("g", ["b"])
        with pytest.raises(ValueError, match="already"):
            made.comms["a"].group("world", ["a"])


def test_a_closed_communicator_says_so(transport: Transport) -> None:
    with party(transport, 1) as made:
        comm = made.comms["a"]
        comm.close()
        with pytest.raises(CommError, match="is closed"):
            comm.world.barrier()
        comm.close()


def test_a_failure_shows_in_the_ring_before_its_caller_hears_of_it(transport: Transport) -> None:
    if transport == "tcp":
        pytest.skip("over TCP parts are copies: nothing is lent")
    with party(transport, 2) as made:
        made.each(lambda comm, rank: comm.world.barrier().wait())
        b = made.comms["b"]
        seen_by_b = b._executors.shared._rings[b.world.list.number]["a"].find(1)
        assert seen_by_b is not None
        assert not seen_by_b.has_failed(1)
        with pytest.raises(Timeout):
            made.comms["a"].world.all_reduce(torch.ones(10), timeout_s=0.05).wait()
        assert seen_by_b.has_failed(1)


def test_a_failed_operation_does_not_send_what_its_caller_writes_afterwards(transport: Transport) -> None:
    if transport == "unix":
        pytest.skip("in shared memory the ring does this")
    with party(transport, 2) as made:
        made.each(lambda comm, rank: comm.world.barrier().wait())
        a, b = made.comms["a"], made.comms["b"]
        parts: list[torch.Tensor] = []
        heard, stuck = threading.Event(), threading.Event()

        def listen(frame: Frame) -> None:
            parts.append(frame.tensors[0].clone())
            heard.set()

        b._executors.messages.hear_part = listen  # type: ignore[method-assign]

        def sit() -> None:
            stuck.wait(20)

        b._driver.post(sit)  # b reads nothing: what a sends has to wait
        tensor = a.empty(10_000_000, torch.float32)
        tensor.fill_(1)
        with pytest.raises(Timeout):
            a.world.all_reduce(tensor, timeout_s=0.1).wait()
        assert made.meshes["a"].links.unsent_bytes > 0
        tensor.fill_(-1)
        stuck.set()
        assert heard.wait(20)
        assert bool((parts[0] == 1).all())


def test_a_result_made_of_tensors_that_changed_meanwhile_is_thrown_away(transport: Transport) -> None:
    """b has a's part, but a has failed before b is done with it."""
    if transport == "tcp":
        pytest.skip("over TCP parts are copies: they cannot change")
    with party(transport, 2) as made:
        made.each(lambda comm, rank: comm.world.barrier().wait())
        a, b = made.comms["a"], made.comms["b"]
        ring = b._executors.shared._rings[b.world.list.number]["a"].find(1)
        assert ring is not None
        before = ring.published(1)
        tensor = a.empty(100_000, torch.float32)
        a.world.all_reduce(tensor)
        deadline_s, tick = time.monotonic() + 20, threading.Event()
        while ring.published(1) == before:  # a has shown its part
            assert time.monotonic() < deadline_s
            tick.wait(0.001)
        mine = a._executors.shared._tracks[a.world.list.number].state.ring
        assert mine is not None
        mine.fail()  # what a failure does first
        with pytest.raises(Timeout, match=r"nothing from a within 0\.1 s"):
            b.world.all_reduce(torch.ones(100_000), timeout_s=0.1).wait()
