"""A checkpoint that was cut into shards is the model and the optimizer that plain PyTorch knows, bit for bit."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.job.layout import FROZEN, Layout, ParameterSpec, cut
from elastrain.snapshot.durable.conversion import FORMS, export, import_files
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import (
    BUFFERS,
    GroupEntry,
    Manifest,
    ParameterEntry,
    PieceEntry,
    ShardEntry,
    name_of,
)
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.plain import Gathering, PlainState, gather, pack_named
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState

Trained = tuple[nn.Module, torch.optim.Optimizer]


class Net(nn.Module):
    """A tied weight, a frozen bias, a buffer, and one layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(30, 12)
        self.body = nn.Linear(12, 12)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.emb.weight
        self.body.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.emb(x))) * self.scale
        return found


def trained() -> Trained:
    torch.manual_seed(3)
    model = Net()
    moved = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": moved[2:], "lr": 0.2}, {"params": moved[:2]}], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 30, (4, 7))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Layout:
    groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    specs = [
        ParameterSpec(
            name=name,
            block="all",
            shape=tuple(p.shape),
            dtype="float32",
            group=groups.get(id(p), FROZEN),
            requires_grad=p.requires_grad,
        )
        for name, p in model.named_parameters()
    ]
    return cut(parameters=specs, blocks=["all"], shard_numel=128)


def save_model(place: LocalPlace, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest:
    """As a job would, by its layout."""
    layout = layout_of(model, optimizer)
    parameters = dict(model.named_parameters())
    writer = PartWriter(place, name_of(1, 2), writer="m0")
    entries = []
    for shard in layout.shards:
        values = torch.zeros(shard.numel)
        pieces, kept = [], []
        for leaf in layout.leaves:
            start, stop = max(shard.start, leaf.start), min(shard.stop, leaf.start + -(-leaf.numel // 64) * 64)
            if leaf.flat != shard.flat or start >= stop:
                continue
            offset, valid = start - leaf.start, min(stop, leaf.start + leaf.numel) - start
            piece = PieceEntry(
                parameter=leaf.parameter,
                start=start - shard.start,
                numel=stop - start,
                valid_numel=valid,
                offset=offset,
            )
            tensor = parameters[layout.parameters[leaf.parameter].name]
            values[piece.start : piece.start + valid] = tensor.detach().reshape(-1)[offset : offset + valid]
            pieces.append(piece)
            kept.append({n: _cut(v, piece) for n, v in optimizer.state.get(tensor, {}).items()})
        state = ShardState(shard=shard.index, version=2, parameters=values, pieces=kept if shard.lanes else [])
        written = writer.write(state)
        entries.append(
            ShardEntry(
                index=shard.index,
                block="all",
                dtype="float32",
                numel=shard.numel,
                pieces=tuple(pieces),
                digest=written.digest,
                parts=(written.part,),
            )
        )
    buffers = writer.attach(*pack_named({"scale": model.scale}))  # type: ignore[dict-item]
    writer.finish()
    made = manifest_of(layout, model, optimizer, tuple(entries), {BUFFERS: (buffers,)})
    publish(place, made)
    return made


def _cut(value: Any, piece: PieceEntry) -> Any:
    if value.dim() == 0:
        return value
    padded = torch.zeros(piece.numel)
    padded[: piece.valid_numel] = value.reshape(-1)[piece.offset : piece.offset + piece.valid_numel]
    return padded


def manifest_of(
    layout: Layout, model: nn.Module, optimizer: torch.optim.Optimizer, shards: tuple[ShardEntry, ...], attached: Any
) -> Manifest:
    names = {id(p): name for name, p in model.named_parameters()}
    return Manifest(
        job="job",
        life=1,
        step=2,
        time_s=0.0,
        spec={},
        counters={},
        optimizer="AdamW",
        parameters=tuple(
            ParameterEntry(
                name=p.name,
                shape=p.shape,
                dtype=p.dtype,
                group=p.group,
                also=("head.weight",) if p.name == "emb.weight" else (),
            )
            for p in layout.parameters
        ),
        groups=tuple(
            GroupEntry(
                parameters=tuple(names[id(p)] for p in group["params"]),
                hyper={n: list(v) if isinstance(v, tuple) else v for n, v in group.items() if n != "params"},
            )
            for group in optimizer.param_groups
        ),
        shards=shards,
        attachments=attached,
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.fixture
def job() -> Trained:
    return trained()


@pytest.fixture
def plain(tmp_path: Path, job: Trained) -> PlainState:
    place = LocalPlace(tmp_path / "checkpoints")
    return gather(Checkpoint.open([place], save_model(place, *job).name))


def test_pieces_become_whole_parameters_again(plain: PlainState, job: Trained) -> None:
    model, _ = job
    assert plain.model.keys() == model.state_dict().keys()
    assert all(torch.equal(plain.model[name], value) for name, value in model.state_dict().items())
    assert "unused.weight" not in plain.state


def goes_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    torch.manual_seed(5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randint(0, 30, (4, 7))).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def fresh() -> Trained:
    model = Net()
    moved = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW([{"params": moved[2:]}, {"params": moved[:2]}])


def test_an_export_for_torch_goes_on_bit_for_bit(tmp_path: Path, plain: PlainState, job: Trained) -> None:
    export(plain, tmp_path / "out", "torch")
    model, optimizer = fresh()
    model.load_state_dict(torch.load(tmp_path / "out/model.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(tmp_path / "out/optimizer.pt", weights_only=True))
    assert equal(optimizer.state_dict()["state"], job[1].state_dict()["state"])
    assert equal(goes_on(model, optimizer), goes_on(*job))


def test_an_export_of_safetensors_needs_that_library_alone(tmp_path: Path, plain: PlainState, job: Trained) -> None:
    from safetensors.torch import load_file

    export(plain, tmp_path / "out", "safetensors")
    model, _ = fresh()
    model.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    assert equal(dict(model.state_dict()), dict(job[0].state_dict()))
    moments = load_file(tmp_path / "out/optimizer.safetensors")
    weight = job[0].get_parameter("body.weight")
    assert torch.equal(moments["body.weight.exp_avg"], job[1].state[weight]["exp_avg"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_for_dcp_loads_with_torch_distributed(tmp_path: Path, plain: PlainState, job: Trained) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    export(plain, tmp_path / "out", "dcp")
    model, optimizer = fresh()
    goes_on(model, optimizer)  # so that it has state to load into
    whole = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(whole, checkpoint_id=tmp_path / "out", no_dist=True)
    model.load_state_dict(whole["model"])
    # Not strict, because one layer was never stepped: there is no state of it.
    set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=StateDictOptions(strict=False))
    assert equal(goes_on(model, optimizer), goes_on(*job))


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(tmp_path: Path, plain: PlainState) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(TakenError, match="nothing is overwritten"):
        export(plain, tmp_path / "out", "torch")
    spoiled = PlainState(**{**vars(plain), "state": {"body.weight": {"entry": None}}})
    with pytest.raises(CheckpointError, match="None"):
        export(spoiled, tmp_path / "other", "safetensors")
    assert [path.name for path in tmp_path.iterdir() if "other" in path.name] == []


def test_what_a_killed_export_left_goes_with_the_next_one_and_what_is_being_written_stays(
    tmp_path: Path, plain: PlainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begun, may_end = tmp_path / "out", threading.Event(), threading.Event()

    def slow(_: PlainState, folder: Path) -> None:
        (folder / "begun").touch()
        begun.set()
        assert may_end.wait(30)

    def killed(_: PlainState, folder: Path) -> None:
        (folder / "half").touch()
        os._exit(9)

    monkeypatch.setitem(FORMS, "slow", slow)
    monkeypatch.setitem(FORMS, "killed", killed)

    def export_slowly() -> None:
        with suppress(CheckpointError):  # the other one is there first
            export(plain, out, "slow")

    beside = threading.Thread(target=export_slowly)
    beside.start()
    assert begun.wait(30)
    if (child := os.fork()) == 0:
        export(plain, out, "killed")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (tmp_path / ".out-of-order").mkdir()
    assert len(list(tmp_path.glob(".out.writing-*"))) == 2
    export(plain, out, "torch")
    assert [file.name for file in tmp_path.glob(".out.writing-*/out/*")] == ["begun"]
    assert len(list(tmp_path.glob(".out.writing-*"))) == 1
    (tmp_path / "usual").mkdir()
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / ".out-of-order").is_dir()
    may_end.set()
    beside.join(30)


def test_what_was_exported_is_imported_as_the_same_plain_state(tmp_path: Path, plain: PlainState) -> None:
    export(plain, tmp_path / "out", "safetensors")
    place = LocalPlace(tmp_path / "imported")
    made = import_files(place, [tmp_path / "out/model.safetensors"], tmp_path / "out/optimizer.safetensors")
    assert (made.step, made.optimizer, made.groups) == (-1, "AdamW", plain.groups)
    again = gather(Checkpoint.open([place], made.name))
    assert equal({**again.model}, {name: plain.model[name] for name in again.model})
    assert again.model.keys() == plain.model.keys()
    assert again.state.keys() == plain.state.keys()
    assert all(equal(again.state[n][e], v) for n, entries in plain.state.items() for e, v in entries.items())


def test_files_that_can_run_code_are_not_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="can run code"):
        import_files(LocalPlace(tmp_path / "imported"), [tmp_path / "model.pt"])
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(DamagedError, match="none of safetensors"):
        import_files(LocalPlace(tmp_path / "imported"), [tmp_path / "model.safetensors"])
    with pytest.raises(CheckpointError, match="does not exist"):
        import_files(LocalPlace(tmp_path / "imported"), [tmp_path / "none.safetensors"])


def test_an_export_tells_how_much_is_written_while_it_writes(
    tmp_path: Path, plain: PlainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    half = threading.Event()

    def write(_: PlainState, folder: Path) -> None:
        with (folder / "file").open("wb") as file:
            file.truncate(8 << 20)  # as safetensors does
            file.write(bytes(range(256)) * (1 << 12))
            file.flush()
            assert half.wait(30.0)
            file.write(bytes(range(256)) * (1 << 12))

    def note(done_bytes: int) -> None:
        told.append(done_bytes)
        if done_bytes >= 1 << 20:
            half.set()

    monkeypatch.setitem(FORMS, "slow", write)
    export(plain, tmp_path / "out", "slow", note)
    assert max(told) < 3 << 20
    assert not [thread for thread in threading.enumerate() if thread.name == "export"]


def test_a_damaged_copy_of_a_shard_does_not_count_and_its_repetition_does() -> None:
    parameters = [ParameterEntry(name="weight", shape=(6,), dtype="float32", group=0)]
    pieces = [[PieceEntry(parameter=0, start=0, numel=4, offset=at, valid_numel=3)] for at in (0, 3)]
    gathering = Gathering(parameters, pieces)

    def state(shard: int, name: str = "exp_avg") -> ShardState:
        values = torch.arange(4.0) + 10 * shard
        return ShardState(shard=shard, parameters=values, pieces=[{name: values + 1, "step": torch.tensor(5.0)}])

    damaged = replace(state(0, "exp_avh"), pieces=[{"exp_avh": torch.full((4,), 9.0), "step": torch.tensor(6.0)}])
    assert not gathering.add(damaged, is_intact=lambda: False)
    assert gathering.add(state(0))
    assert not gathering.add(replace(state(1), parameters=torch.zeros(2)), is_intact=lambda: False)
    with pytest.raises(CheckpointError, match="only 3 elements are there"):
        gathering.state()
    assert gathering.add(state(1))
    kept = gathering.state()["weight"]
    assert set(kept) == {"exp_avg", "step"} and kept["step"] == 5
    assert kept["exp_avg"].tolist() == [1, 2, 3, 11, 12, 13]
    assert gathering.parameters()[0]["weight"].tolist() == [0, 1, 2, 10, 11, 12]
