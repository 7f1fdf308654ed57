"""For any model: every element lies in exactly one piece, and nothing depends on anything but the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.job.layout import ALIGN, FROZEN, Layout, ParameterSpec, cut, round_up

BLOCKS = ("", "a", "b", "c")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    specs, ties = [], {}
    for index in range(draw(st.integers(1, 12))):
        block = draw(st.sampled_from(BLOCKS))
        spec = ParameterSpec(
            name=f"p{index}",
            block=block,
            shape=tuple(draw(st.lists(st.integers(0, 12), max_size=3))),
            dtype=draw(st.sampled_from(["float32", "float64"])),
            group=draw(st.sampled_from([FROZEN, 0, 1])),
            requires_grad=draw(st.booleans()),
        )
        specs.append(spec)
        later = BLOCKS[BLOCKS.index(block) + 1 :]
        if later:
            ties[spec.name] = sorted(draw(st.sets(st.sampled_from(later))))
    size = draw(st.none() | st.integers(1, 12).map(lambda n: n * ALIGN))
    return cut(specs, blocks=BLOCKS, ties=ties, shard_numel=size)


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(layout=layouts())
def test_shards_tile_every_flat_that_holds_parameters(layout: Layout) -> None:
    for flat in layout.flats:
        shards = [s for s in layout.shards if s.flat == flat.index]
        if flat.alias_of is not None:
            assert not shards
            continue
        assert [s.start for s in shards] + [flat.numel] == [0] + [s.stop for s in shards]
        assert all(s.start % ALIGN == 0 and s.stop % ALIGN == 0 and s.numel <= layout.shard_numel for s in shards)
        assert all((s.block, s.dtype) == (flat.block, flat.dtype) for s in shards)
    assert [s.index for s in layout.shards] == list(range(len(layout.shards)))


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(layout=layouts())
def test_pieces_tile_every_trained_shard_and_every_trained_parameter(layout: Layout) -> None:
    valid = [0] * len(layout.parameters)
    for shard, pieces in zip(layout.shards, layout.pieces, strict=True):
        if shard.lanes:
            assert [p.start for p in pieces] + [shard.numel] == [0] + [p.stop for p in pieces]
        for piece in pieces:
            assert 0 < piece.valid_numel <= piece.stop - piece.start < piece.valid_numel + ALIGN
            assert piece.group == layout.flats[shard.flat].group == layout.parameters[piece.parameter].group
            valid[piece.parameter] += piece.valid_numel
    assert valid == [spec.numel if spec.trained else 0 for spec in layout.parameters]


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(layout=layouts())
def test_leaves_lie_aligned_side_by_side_and_each_parameter_has_one_home(layout: Layout) -> None:
    for flat in layout.flats:
        leaves = sorted((x for x in layout.leaves if x.flat == flat.index), key=lambda x: (x.start, x.numel))
        ends = [leaf.start + round_up(leaf.numel) for leaf in leaves]
        assert [leaf.start for leaf in leaves] + [flat.numel] == [0, *ends]
    homes = [leaf.parameter for leaf in layout.leaves if layout.flats[leaf.flat].alias_of is None]
    assert sorted(homes) == list(range(len(layout.parameters)))
    assert [leaf.index for leaf in layout.leaves] == list(range(len(layout.leaves)))


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(layout=layouts())
def test_lanes_of_a_shard_are_alike_and_in_block_order(layout: Layout) -> None:
    for shard in layout.shards:
        flats = [layout.flats[lane.flat] for lane in shard.lanes]
        assert bool(flats) == layout.flats[shard.flat].trained
        assert [lane.block for lane in shard.lanes] == sorted({flat.block for flat in flats})
        assert {(f.numel, f.dtype, f.group) for f in flats} <= {
            (layout.flats[shard.flat].numel, shard.dtype, layout.flats[shard.flat].group)
        }
