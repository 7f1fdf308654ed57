"""What a member reads of a checkpoint: the whole model's parameters, its own shards' states, and nothing twice."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from elastrain import protocol as p
from elastrain.base.resume import Resume
from elastrain.errors import ConfigError, StateLostError
from elastrain.runtime.durable import stored_initial
from elastrain.runtime.durable.node_disks import Reader
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.io.loop_channel import LoopFailed
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.runtime.model.partition import describe
from elastrain.snapshot.durable.manifest import Manifest, ParameterEntry, ShardEntry, name_of
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState

READER = Reader(member="m0", node="node0", scope="job", secret=None, source="")


def quiet(_done_bytes: int, _size_bytes: int) -> None: ...


def model_state() -> ModelState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    return ModelState(model, describe(model, optimizer, None), lambda numel, dtype: torch.zeros(numel, dtype=dtype))


def optimizer_of(model: ModelState, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> PieceOptimizer:
    return PieceOptimizer(kind(nn.Linear(1, 1).parameters()), model.layout)


def saved(
    folder: Path, model: ModelState, step: int = 4, parameters: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> tuple[Resume, list[ShardState]]:
    """A checkpoint with random numbers; `parameters`: what the manifest says of them."""
    layout = model.layout
    states = [
        ShardState(
            shard=shard.index,
            version=step,
            parameters=torch.randn(shard.numel, dtype=getattr(torch, shard.master_dtype)),
            pieces=[{"exp_avg": torch.randn(piece.stop - piece.start)} for piece in layout.pieces[shard.index]],
        )
        for shard in layout.shards
    ]
    writer = PartWriter(place_at(str(folder)), name_of(1, step), writer="m0")
    written = [writer.write(state) for state in states]
    writer.finish()
    shards = tuple(
        ShardEntry(
            index=s.index, block="", dtype=s.master_dtype, numel=s.numel, pieces=(), digest=w.digest, parts=(w.part,)
        )
        for s, w in zip(layout.shards, written, strict=True)
    )
    spec: dict[str, Any] = {"model": layout.digest()}
    told = tuple(ParameterEntry(name=n, shape=shape, dtype="float32", group=0) for n, shape in parameters.items())
    manifest = Manifest(
        job="job", life=1, step=step, time_s=0.0, spec=spec, counters={}, optimizer="AdamW", parameters=told, groups=(),
        shards=shards, attachments={},
    )  # fmt: skip
    publish(place_at(str(folder)), manifest)
    return Resume(place=str(folder), name=manifest.name, step=step, spec=spec), states


def read(stored: StoredInitial, told: queue.SimpleQueue[Any], *shards: int) -> Any:
    stored.carry_out(p.ReadInitial(shards=shards))
    return told.get(timeout=180)


def test_all_parameters_come_into_the_model_and_own_shards_beside_it(tmp_path: Path) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume, states = saved(tmp_path, model)
    stored = StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet)
    assert read(stored, told, 1) == p.InitialRead(shards=(1,))
    for shard, state in zip(model.layout.shards, states, strict=True):
        here = model.parameters_of(shard)
        assert torch.equal(here, state.parameters.to(here.dtype))
    assert stored.take(1).digest() == states[1].digest()
    with pytest.raises(KeyError):
        stored.take(0)


def test_what_a_change_of_view_adds_is_read_without_touching_the_model_again(tmp_path: Path) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume, states = saved(tmp_path, model)
    stored = StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet)
    read(stored, told)
    model.parameters_of(model.layout.shards[0]).fill_(7.0)  # a step was committed meanwhile, say
    read(stored, told, 0)
    assert bool((model.parameters_of(model.layout.shards[0]) == 7.0).all())
    assert stored.take(0).digest() == states[0].digest()


@pytest.mark.parametrize(
    "command",
    [
        p.Bind(step=4, shard=1),
        p.TakeParameters(step=4, shard=1, payload=(), index=0),
        p.Apply(record=None, shards=(1,), touched={}),  # type: ignore[arg-type]
    ],
    ids=lambda command: type(command).__name__,
)
def test_what_comes_from_others_while_a_checkpoint_is_read_is_not_overwritten(
    command: p.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last holder may be gone, and this member may train on its copies, before its own reading has ended."""
    model, told, come = model_state(), queue.SimpleQueue[Any](), threading.Event()
    resume, states = saved(tmp_path, model)
    stored = StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet)
    parameters = Checkpoint.read_parameters

    def slowly(self: Checkpoint, indices: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        for shard, each in parameters(self, indices):
            if shard == 1:
                assert come.wait(60)
            yield shard, each

    monkeypatch.setattr(Checkpoint, "read_parameters", slowly)
    stored.carry_out(p.ReadInitial(shards=()))
    with stored.making_way(command):
        model.parameters_of(model.layout.shards[1]).fill_(7.0)
    come.set()
    assert told.get(timeout=180) == p.InitialRead(shards=())
    first, second = (model.parameters_of(shard) for shard in model.layout.shards[:2])
    assert torch.equal(first, states[0].parameters.to(first.dtype))
    assert bool((second == 7.0).all())


def test_blocks_that_are_let_go_while_a_checkpoint_is_read_are_left_out(tmp_path: Path) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume, states = saved(tmp_path, model)
    stored = StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet)
    with stored.making_way(p.HoldBlocks(blocks=(0,))):  # the reading waits for that
        stored.carry_out(p.ReadInitial(shards=()))
        gone = [flat for flat in model._memory.flats if flat != model.layout.shards[0].flat]
        for flat in gone:
            del model._memory.flats[flat]
    assert told.get(timeout=180) == p.InitialRead(shards=())
    assert gone
    assert torch.equal(model.parameters_of(model.layout.shards[0]), states[0].parameters)


@pytest.mark.parametrize("shards", [(), (0, 1)])
def test_a_damaged_shard_ends_the_life_with_a_sentence_whoever_holds_it(
    shards: tuple[int, ...], tmp_path: Path
) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume, _ = saved(tmp_path, model)
    file = next(f for f in (tmp_path / resume.name).iterdir() if f.name.startswith("part"))
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(bytes(content))
    failed = read(StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet), told, *shards)
    assert isinstance(failed, LoopFailed) and isinstance(failed.error, StateLostError)
    assert "is damaged" in str(failed.error) and "shard" in str(failed.error)


def test_another_model_is_refused_by_a_parameters_name_before_anything_is_read(tmp_path: Path) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    shapes = {spec.name: spec.shape for spec in model.layout.parameters}

    def refused(shapes: dict[str, tuple[int, ...]], **options: Any) -> str:
        resume, _ = saved(tmp_path, model, parameters=shapes)
        other = replace(resume, spec={"model": "another"}, **options)
        try:
            StoredInitial(other, model, optimizer_of(model), READER, told.put, quiet).check(
                nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
            )
        except ConfigError as error:
            return str(error).replace(str(resume), "it")
        finally:
            shutil.rmtree(tmp_path / resume.name)
        return ""

    assert refused(shapes) == "", "what else the hash covers, the agent refuses"
    wide = refused({**shapes, "1.bias": (7,)})
    assert wide == "'1.bias' is of shape (80,) in the model and of (7,) in it: it is of another model"
    assert refused({**shapes, "2.bias": (7,)}) == "it has '2.bias', and the model does not: it is of another model"
    assert refused({**shapes, "2.bias": (7,)}, accepts_changes=True) == ""
    assert refused({"0.weight": (80, 80)}).startswith("the model has '0.bias', and it does not (it has 0.weight)")


def test_a_checkpoint_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume = Resume(place=str(tmp_path), name=name_of(1, 9), step=9)
    failed = read(StoredInitial(resume, model, optimizer_of(model), READER, told.put, quiet), told)
    assert isinstance(failed, LoopFailed) and isinstance(failed.error, ConfigError)
    assert "step-0000000009" in str(failed.error)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(torch.optim.SGD, set()), (torch.optim.Adagrad, {"step", "sum"}), (torch.optim.Adam, {"exp_avg"})],
)
def test_what_another_optimizer_kept_is_left_out(
    kind: type[torch.optim.Optimizer], kept: set[str], tmp_path: Path
) -> None:
    model, told = model_state(), queue.SimpleQueue[Any]()
    resume, states = saved(tmp_path, model)
    stored = StoredInitial(resume, model, optimizer_of(model, kind), READER, told.put, quiet)
    read(stored, told, 0)
    found = stored.take(0)
    assert [set(piece) for piece in found.pieces] == [kept] * len(states[0].pieces)
    assert (found.version, found.parameters.tolist()) == (4, states[0].parameters.tolist())


@pytest.mark.parametrize("is_cut_alike", [True, False])
def test_how_much_is_read_is_shown_and_at_the_end_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut_alike: bool
) -> None:
    monkeypatch.setattr(stored_initial, "SHOW_EVERY_S", 0.0)
    model, told, shown = model_state(), queue.SimpleQueue[Any](), list[tuple[int, int]]()
    resume, _ = saved(tmp_path, model)
    show = lambda *bytes_: shown.append(bytes_)  # noqa: E731
    stored = StoredInitial(resume, model, optimizer_of(model), READER, told.put, show)
    assert isinstance(read(stored, told, 1), p.InitialRead)
    first, last = shown[0], shown[-1]
    assert 0 < first[0] < first[1]
    assert last == (first[1], first[1])
    assert shown == sorted(shown)
    # Of other shards the parameters alone are read: less than all.
    assert last[1] < Checkpoint.open([place_at(str(tmp_path))], resume.name).manifest.size_bytes
