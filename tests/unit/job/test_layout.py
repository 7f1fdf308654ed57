"""Cutting a model: flats, leaves, lanes, shards and pieces of small examples that can be checked by eye."""

from __future__ import annotations

from typing import Any

import pytest

from elastrain.errors import ConfigError
from elastrain.job.layout import (
    ALIGN,
    FROZEN,
    Flat,
    GradientLane,
    Layout,
    ParameterSpec,
    cut,
    default_shard_numel,
    round_up,
)


def _spec(name: str, block: str = "a", numel: int = 100, **fields: Any) -> ParameterSpec:
    known = {"dtype": "float32", "group": 0, "requires_grad": True, **fields}
    return ParameterSpec(name=name, block=block, shape=(numel,), **known)


def _tied() -> Layout:
    specs = [_spec("emb", "a"), _spec("w", "b", 70), _spec("bias", "b", 3)]
    return cut(specs, blocks=["a", "b"], ties={"emb": ["b"]}, shard_numel=64)


def test_parameters_start_at_multiples_of_the_alignment_in_one_flat_per_block_group_and_dtype() -> None:
    layout = cut(
        [
            _spec("a.w", "a", 100),
            _spec("a.b", "a", 10, group=1),
            _spec("a.c", "a", 10),
            _spec("a.d", "a", 65, dtype="float64"),
            _spec("b.w", "b", 1),
        ],
        blocks=["a", "b"],
    )
    assert [(f.block, f.group, f.dtype, f.numel) for f in layout.flats] == [
        (0, 0, "float32", 192),
        (0, 1, "float32", 64),
        (0, 0, "float64", 128),
        (1, 0, "float32", 64),
    ]
    assert [(leaf.parameter, leaf.flat, leaf.start, leaf.numel) for leaf in layout.leaves] == [
        (0, 0, 0, 100),
        (2, 0, 128, 10),
        (1, 1, 0, 10),
        (3, 2, 0, 65),
        (4, 3, 0, 1),
    ]


def test_a_shard_holds_padded_pieces_of_the_parameters_that_it_meets() -> None:
    layout = cut([_spec("w", numel=100), _spec("b", numel=10)], blocks=["a"], shard_numel=128)
    assert [(s.start, s.stop) for s in layout.shards] == [(0, 128), (128, 192)]
    first, second = layout.pieces
    assert [(p.parameter, p.start, p.stop, p.valid_numel) for p in first] == [(0, 0, 128, 100)]
    assert [(p.parameter, p.start, p.stop, p.valid_numel) for p in second] == [(1, 0, 64, 10)]


def test_a_parameter_larger_than_a_shard_is_cut() -> None:
    layout = cut([_spec("w", numel=100)], blocks=["a"], shard_numel=64)
    assert [[(p.start, p.stop, p.valid_numel) for p in pieces] for pieces in layout.pieces] == [
        [(0, 64, 64)],
        [(0, 64, 36)],
    ]


def test_a_tied_parameter_has_its_own_flat_and_an_alias_with_the_same_cutting() -> None:
    layout = _tied()
    assert layout.flats[0] == Flat(index=0, block=0, group=0, dtype="float32", numel=128)
    assert layout.flats[2] == Flat(index=2, block=1, group=0, dtype="float32", numel=128, alias_of=0)
    tied = [s for s in layout.shards if s.flat == 0]
    assert [s.lanes for s in tied] == [(GradientLane(block=0, flat=0), GradientLane(block=1, flat=2))] * 2
    assert [leaf.parameter for leaf in layout.leaves_of(1)] == [1, 2, 0]


def test_only_shards_of_real_flats_exist() -> None:
    layout = _tied()
    assert {s.flat for s in layout.shards} == {0, 1}
    assert all(len(s.lanes) == 1 for s in layout.shards if s.flat == 1)


def test_lanes_follow_the_order_of_the_blocks() -> None:
    layout = cut([_spec("w", "a")], blocks=["a", "b", "c"], ties={"w": ["b", "c"]})
    assert [lane.block for lane in layout.shards[0].lanes] == [0, 1, 2]


def test_a_parameter_is_touched_when_one_of_its_leaves_is() -> None:
    layout = _tied()
    alias = layout.leaves_of(1)[-1]
    assert layout.touched_parameters([alias.index]) == {0}
    assert layout.touched_parameters([]) == frozenset()


@pytest.mark.parametrize("fields", [{"group": FROZEN}, {"requires_grad": False}])
def test_a_frozen_parameter_has_shards_but_no_gradient(fields: dict[str, Any]) -> None:
    layout = cut([_spec("w"), _spec("f", **fields)], blocks=["a", "b"], ties={"f": ["b"]})
    frozen = next(f for f in layout.flats if not f.trained)
    (shard,) = [s for s in layout.shards if s.flat == frozen.index]
    assert shard.lanes == () and layout.pieces[shard.index] == () and shard.numel == 128
    assert [leaf.parameter for leaf in layout.leaves_of(0)] == [0] and layout.leaves_of(1) == ()


def test_parameters_without_elements_take_no_room() -> None:
    layout = cut([_spec("none", numel=0), _spec("w")], blocks=["a"])
    assert [leaf.numel for leaf in layout.leaves_of(0)] == [0, 100]
    assert [p.parameter for p in layout.pieces[0]] == [1]


def test_scalars_have_one_element() -> None:
    spec = ParameterSpec(name="t", block="a", shape=(), dtype="float32", group=0, requires_grad=True)
    assert spec.numel == 1 and cut([spec], blocks=["a"]).flats[0].numel == ALIGN


@pytest.mark.parametrize(
    ("total", "size"),
    [(0, 4096), (4096 * 64, 4096), (4096 * 64 + 1, 4096 + 64), (1_500_000, 23_488), (10**9, 4 * 1024 * 1024)],
)
def test_the_shard_size_comes_from_the_model_alone(total: int, size: int) -> None:
    assert default_shard_numel(total) == size and size % ALIGN == 0


def test_round_up() -> None:
    assert [round_up(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_the_digest_covers_everything() -> None:
    base = [_spec("w"), _spec("v")]
    layouts = [
        cut(base, blocks=["a"]),
        cut(base, blocks=["a", "b"]),
        cut(base[::-1], blocks=["a"]),
        cut(base, blocks=["a"], shard_numel=64),
        cut([base[0], _spec("u")], blocks=["a"]),
        cut([base[0], _spec("v", numel=99)], blocks=["a"]),
        cut([base[0], _spec("v", group=1)], blocks=["a"]),
        cut(base, blocks=["a", "b"], ties={"v": ["b"]}),
    ]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert layouts[0].digest() == cut(base, blocks=["a"], ties={"w": []}).digest()
    assert layouts[0].digest() == "0a314b4256067fc4841ad04e02aca449"


@pytest.mark.parametrize(
    ("specs", "options", "sentence"),
    [
        ([_spec("w"), _spec("w")], {}, "named once"),
        ([_spec("w", "x")], {}, r"not named: \['x'\]"),
        ([_spec("w")], {"blocks": ["a", "a"]}, "each block is named once"),
        ([_spec("w")], {"shard_numel": 100}, "multiple of 64"),
        ([_spec("w")], {"shard_numel": 0}, "multiple of 64"),
        ([_spec("w")], {"ties": {"v": ["b"]}}, "unknown parameter 'v'"),
        ([_spec("w")], {"ties": {"w": ["x"]}}, "'w' must be known"),
        ([_spec("w", "b")], {"ties": {"w": ["a"]}}, "in the model's order"),
        ([_spec("w")], {"ties": {"w": ["b", "b"]}}, "distinct"),
    ],
)
def test_what_does_not_fit_together_is_refused(specs: list[ParameterSpec], options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cut(specs, **{"blocks": ["a", "b"], **options})
