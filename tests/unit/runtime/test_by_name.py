"""Shards from a checkpoint that was cut otherwise: every element comes to its place, by the names of parameters."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS, Layout, ParameterSpec, cut
from elastrain.runtime.durable import by_name
from elastrain.snapshot.durable.manifest import ParameterEntry
from elastrain.snapshot.durable.plain import PlainState

SHAPES = {"a.weight": (30, 7), "a.bias": (30,), "a.scale": (), "b.weight": (300, 3), "b.mean": (5,)}


def layout_of(shard_numel: int) -> Layout:
    parameters = [
        ParameterSpec(
            name=name,
            block=name[0],
            shape=shape,
            dtype="bfloat16" if name == "b.weight" else "float64" if name == "b.mean" else "float32",
            group=STATISTICS if name == "b.mean" else 0,
            requires_grad=name != "b.mean",
        )
        for name, shape in SHAPES.items()
    ]
    return cut(parameters, blocks=("a", "b"), shard_numel=shard_numel)


def plain() -> PlainState:
    values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    moments = {n: {"step": torch.tensor(3.0), "exp_avg": torch.randn(s)} for n, s in SHAPES.items() if n != "b.mean"}
    model = {**values, "b.weight": values["b.weight"].bfloat16(), "b.mean": values["b.mean"].double()}
    return PlainState(
        model=model, masters={"b.weight": values["b.weight"]}, state=moments, groups=(), optimizer="AdamW"
    )


def gathered(source: PlainState, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and first moments again, by name, from all shards."""
    values = {spec.name: torch.full((spec.numel,), torch.nan, dtype=torch.float64) for spec in layout.parameters}
    moments = {name: value.clone() for name, value in values.items() if name != "b.mean"}
    for shard in layout.shards:
        state = by_name.shard_state(source, layout, shard, 4)
        assert state.version == 4 and state.parameters.numel() == shard.numel
        for leaf in layout.leaves:
            name = layout.parameters[leaf.parameter].name
            start, stop = max(leaf.start, shard.start), min(leaf.start + leaf.numel, shard.stop)
            if leaf.flat == shard.flat and start < stop:
                here = slice(start - leaf.start, stop - leaf.start)
                values[name][here] = state.parameters[start - shard.start : stop - shard.start].double()
        for piece, kept in zip(layout.pieces[shard.index], state.pieces, strict=True):
            if not kept:
                continue
            assert kept["step"] == 3.0 and kept["exp_avg"].numel() == piece.stop - piece.start
            assert not kept["exp_avg"][piece.valid_numel :].any()
            spec = layout.parameters[piece.parameter]
            leaf = next(leaf for leaf in layout.leaves if leaf.parameter == piece.parameter)
            offset = shard.start + piece.start - leaf.start
            part = kept["exp_avg"][: piece.valid_numel].double()
            moments[spec.name][offset : offset + piece.valid_numel] = part
    return values, moments


@pytest.mark.parametrize("shard_numel", [64, 128, 4096])
def test_every_element_comes_to_its_place_however_the_model_is_cut(shard_numel: int) -> None:
    source = plain()
    values, moments = gathered(source, layout_of(shard_numel))
    for name in SHAPES:
        whole = source.masters.get(name, source.model[name]).double().reshape(-1)
        assert torch.equal(values[name], whole), name
        if name in moments:
            assert torch.equal(moments[name], source.state[name]["exp_avg"].double().reshape(-1)), name


def test_a_model_alone_starts_with_no_optimizer_state() -> None:
    source = plain()
    alone = PlainState(model=source.model, masters={}, state={}, groups=(), optimizer="")
    layout = layout_of(128)
    assert all(
        by_name.shard_state(alone, layout, s, -1).pieces in ([], [{}], [{}, {}], [{}] * 3) for s in layout.shards
    )


def test_another_model_is_refused_by_the_first_name_that_does_not_fit() -> None:
    layout = layout_of(128)
    entries = {
        spec.name: ParameterEntry(name=spec.name, shape=spec.shape, dtype=spec.dtype, group=0)
        for spec in layout.parameters
    }
    with pytest.raises(ConfigError, match=r"the model has 'a\.weight', and it does not \(it has c\)"):
        by_name.check({"c": entries["b.mean"]}, layout, "it")
    with pytest.raises(ConfigError, match=r"'a\.bias' is of shape \(30,\) in the model and of \(2,\) in it"):
        by_name.check({**entries, "a.bias": replace(entries["a.bias"], shape=(2,))}, layout, "it")
    with pytest.raises(ConfigError, match=r"'a\.bias' is float32 in the model and int8 in it: convert it"):
        by_name.check({**entries, "a.bias": replace(entries["a.bias"], dtype="int8")}, layout, "it")
    by_name.check({**entries, "a.bias": replace(entries["a.bias"], dtype="bfloat16")}, layout, "it")
