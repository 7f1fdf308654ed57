"""comm/collectives/algorithms.py: the plans of all ranks fit together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import AllReduce, Partners, Round
from elastrain.comm.groups.slot_ring import SLOTS

WORLDS = [1, 2, 3, 4, 5, 8, 13]


def _run(plans: list[tuple[Round, ...]]) -> list[list[tuple[int, int, int]]]:
    """Carry every message; returns what each rank received, `(source, start, stop)`. Fails if a rank waits for ever."""
    got: list[list[tuple[int, int, int]]] = [[] for _ in plans]
    at = [0] * len(plans)
    mail: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = {}
    sent: set[tuple[int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, rounds in enumerate(plans):
            if at[rank] == len(rounds):
                continue
            now = rounds[at[rank]]
            if (rank, at[rank]) not in sent:
                sent.add((rank, at[rank]))
                for send in now.sends:
                    box = mail.setdefault((send.to, at[rank]), {})
                    assert rank not in box, "two messages from one rank in one round"
                    box[rank] = (rank, send.start, send.stop)
            if set(mail.get((rank, at[rank]), {})) >= now.awaits:
                got[rank] += sorted(mail.pop((rank, at[rank]), {}).values())
                at[rank] += 1
                moved = True
    assert at == [len(rounds) for rounds in plans]
    assert not mail, "messages that nobody awaits"
    return got


@pytest.mark.parametrize("world", WORLDS)
def test_no_rank_leaves_a_barrier_before_all_have_come(world: int) -> None:
    plans = [algorithms.barrier(rank, world) for rank in range(world)]
    _run(plans)
    for absent in range(world):
        # Without one rank's first message nobody but itself may get through.
        stuck = [() if rank == absent else plan for rank, plan in enumerate(plans)]
        if world > 1:
            with pytest.raises(AssertionError):
                _run(stuck)


@pytest.mark.parametrize("world", WORLDS)
def test_partners_of_all_ranks_agree(world: int) -> None:
    kinds: list[Callable[[int], Partners]] = [lambda rank: algorithms.all_to_all(rank, world)]
    for root in range(world):
        kinds.append(lambda rank, root=root: algorithms.one_to_others(rank, world, root))  # type: ignore[misc]
        kinds.append(lambda rank, root=root: algorithms.others_to_one(rank, world, root))  # type: ignore[misc]
    for kind in kinds:
        partners = [kind(rank) for rank in range(world)]
        sent = {(rank, to) for rank in range(world) for to in partners[rank].to}
        awaited = {(source, rank) for rank in range(world) for source in partners[rank].of}
        assert sent == awaited and all(source != to for source, to in sent)


@pytest.mark.parametrize("world", WORLDS)
def test_roots_reach_and_hear_everybody(world: int) -> None:
    for root in range(world):
        rest = [rank for rank in range(world) if rank != root]
        assert sorted(algorithms.one_to_others(root, world, root).to) == rest
        assert sorted(algorithms.others_to_one(root, world, root).of) == rest


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000, 100_000])
def test_scatter_gather_sums_each_slice_once_and_gives_it_to_all(world: int, numel: int) -> None:
    slices = algorithms.cut(numel, world)
    got = _run([algorithms.scatter_gather(rank, world, numel) for rank in range(world)])
    for rank, messages in enumerate(got):
        scattered, gathered = messages[: world - 1], messages[world - 1 :]
        assert [m[0] for m in scattered] == [m[0] for m in gathered] == [r for r in range(world) if r != rank]
        assert all((start, stop) == slices[rank] for _, start, stop in scattered)
        assert all((start, stop) == (0, slices[source][1] - slices[source][0]) for source, start, stop in gathered)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [0, 1, 64, 200, 4096, 99_999])
def test_slices_cover_everything_once_and_begin_at_cache_lines(world: int, numel: int) -> None:
    slices = algorithms.cut(numel, world)
    assert slices[0][0] == 0 and slices[-1][1] == numel and len(slices) == world
    assert all(before[1] == after[0] for before, after in itertools.pairwise(slices))
    assert all(start % 64 == 0 or start == numel for start, _ in slices)
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) <= 128


def test_the_summation_tree_is_the_documented_one() -> None:
    assert algorithms.tree(1) == ()
    assert algorithms.tree(2) == ((0, 1),)
    assert algorithms.tree(4) == ((0, 1), (2, 3), (0, 2))
    assert algorithms.tree(5) == ((0, 1), (2, 3), (0, 2), (0, 4))
    assert algorithms.tree(7) == ((0, 1), (2, 3), (0, 2), (4, 5), (4, 6), (0, 4))


@pytest.mark.parametrize("world", WORLDS)
def test_the_tree_adds_every_rank_once_and_left_to_right(world: int) -> None:
    sums = [[rank] for rank in range(world)]
    for left, right in algorithms.tree(world):
        sums[left] = sums[left] + sums[right]
        sums[right] = []
    assert sums[0] == list(range(world))


def test_the_choice_depends_on_size_and_gives_its_reason() -> None:
    small, large = (algorithms.choose_all_reduce(size, 4, pulled=False) for size in (4096, 4 << 20))
    assert (small[0], large[0]) == (AllReduce.EXCHANGE, AllReduce.SCATTER_GATHER)
    assert "4096 bytes" in small[1] and "each of 4 ranks" in large[1]
    pulled = algorithms.choose_all_reduce(4 << 20, 4, pulled=True)
    assert pulled[0] is AllReduce.PIPELINE and "every chunk" in pulled[1]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("chunk_count", [1, 2, 5])
def test_a_pipeline_shows_parts_and_sums_once_and_nobody_awaits_its_end(world: int, chunk_count: int) -> None:
    plans = [algorithms.pipeline(rank, world, chunk_count, given=10, sums=4) for rank in range(world)]
    for rank, plan in enumerate(plans):
        rest = frozenset(range(world)) - {rank}
        assert len(plan) == chunk_count + 2
        assert [{(send.to, send.stop) for send in one.sends} for one in plan[:2]] == [
            {(to, numel) for to in rest} for numel in (10, 4)
        ]
        assert (
            not any(one.sends for one in plan[2:]) and [one.again for one in plan] == [False] * 2 + [True] * chunk_count
        )
        assert [one.awaits for one in plan] == [rest] * (chunk_count + 1) + [frozenset()]


@pytest.mark.parametrize("numel", [0, 1, 63, 4096, 99_999])
@pytest.mark.parametrize("longest", [64, 1024, 1 << 20])
def test_chunks_cover_everything_once_and_are_not_too_long(numel: int, longest: int) -> None:
    found = algorithms.chunks(numel, longest)
    assert [at for start, stop in found for at in range(start, stop)] == list(range(numel))
    assert all(stop - start <= longest and start % 64 == 0 for start, stop in found)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_an_operation_shows_fits_in_a_slot_ring(world: int) -> None:
    """A lane tells only at its end that an operation is over: with more than this its own turns would hold it up."""
    for rank in range(world):
        for rounds in (
            algorithms.barrier(rank, world),
            algorithms.pipeline(rank, world, 9, given=64, sums=64),
        ):
            assert sum(not plan.again for plan in rounds) <= SLOTS
