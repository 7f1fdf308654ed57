"""Chains of an evaluation's batches: each computes every block once, in order, by members that hold it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastrain.pipeline.forward_chains import ChainStage, forward_chains

BLOCKS = 6
CUTS = st.sets(st.integers(1, BLOCKS - 1)).map(lambda cuts: (0, *sorted(cuts), BLOCKS))
HELD = st.dictionaries(st.sampled_from(["m0", "m1", "m2", "m3"]), st.frozensets(st.integers(0, BLOCKS - 1)), min_size=1)


@given(CUTS, HELD)
def test_a_chain_computes_every_block_once_where_it_is(
    points: tuple[int, ...], held: dict[str, frozenset[int]]
) -> None:
    units = list(pairwise(points))
    found = forward_chains(units, held)
    lacking = [unit for unit in units if not any(set(range(*unit)) <= blocks for blocks in held.values())]
    heads = [member for member, blocks in held.items() if set(range(*units[0])) <= blocks]
    assert list(found) == ([] if lacking else heads)
    for head, chain in found.items():
        assert chain[0].member == head
        assert (chain[0].begin, chain[-1].end) == (0, BLOCKS)
        assert all(a.end == b.begin for a, b in pairwise(chain))
        for stage in chain:
            assert {stage.begin, stage.end} <= set(points)
            assert set(range(stage.begin, stage.end)) <= held[stage.member]


def test_pipelines_of_the_same_cuts_do_not_meet() -> None:
    held = {"m0": {0, 1}, "m1": {2, 3}, "m2": {0, 1}, "m3": {2, 3}}
    assert forward_chains([(0, 1), (1, 2), (2, 3), (3, 4)], held) == {
        "m0": (ChainStage("m0", 0, 2), ChainStage("m1", 2, 4)),
        "m2": (ChainStage("m2", 0, 2), ChainStage("m3", 2, 4)),
    }


def test_a_member_that_adopted_the_last_blocks_is_in_the_chain_twice() -> None:
    held = {"m0": {0, 3}, "m1": {1, 2}}
    assert forward_chains([(0, 1), (1, 3), (3, 4)], held) == {
        "m0": (ChainStage("m0", 0, 1), ChainStage("m1", 1, 3), ChainStage("m0", 3, 4))
    }
