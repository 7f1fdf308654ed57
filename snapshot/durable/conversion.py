"""A checkpoint as files that plain PyTorch, `safetensors` alone, and `torch.distributed.checkpoint` load.

A plain state dict as a checkpoint with which a job can begin: step -1, no shards, tensors by name.

Read from safetensors alone: a torch file is a pickle, which can run code, and nothing here loads such a file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastrain.base.held_folder import held_folder
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError, told
from elastrain.snapshot.durable.manifest import MODEL, OPTIMIZER, GroupEntry, Manifest, ParameterEntry, Part, name_of
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.plain import PlainState, optimizer_state_dict, pack_named
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.writing import PartWriter

MODEL_FILE, OPTIMIZER_FILE, MASTERS_FILE = "model", "optimizer", "masters"
GROUPS = "elastrain.groups"
"""Key in the metadata of an optimizer's safetensors file: its groups as JSON."""
_LOOK_S = 0.2


def export(plain: PlainState, out: Path, form: str, on_bytes: Callable[[int], None] = lambda _: None) -> list[Path]:
    """Write into the new folder `out`, whole or not at all; returns its files.

    form: one of FORMS. on_bytes: told, by a thread, how many bytes are written so far.

    Raises TakenError if `out` is there, CheckpointError where it cannot be written.
    """
    if os.path.lexists(out):
        raise TakenError(f"{out} is there already, and nothing is overwritten: name another folder")
    with told(f"writing {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with held_folder(f".{out.name}.writing-", inside=out.parent) as held:
            fresh = held / out.name
            fresh.mkdir()
            with _watched(fresh, on_bytes):
                FORMS[form](plain, fresh)
            for file in fresh.iterdir():
                _sync(file)
            os.rename(fresh, out)
            _sync(out.parent)
    return sorted(out.iterdir())


@contextmanager
def _watched(folder: Path, on_bytes: Callable[[int], None]) -> Iterator[None]:
    """Of what the libraries write there, since none of them says how much it is."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            with suppress(OSError):  # a file that has just been renamed
                # A size may be set in advance: blocks are not.
                on_bytes(sum(file.stat().st_blocks * 512 for file in folder.iterdir()))

    looking = threading.Thread(target=look, name="export")
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()


def _safetensors(plain: PlainState, folder: Path) -> None:
    from safetensors.torch import save_file

    # A tied parameter has one memory and two names, which this format refuses: each name gets bytes of its own.
    save_file({n: t.contiguous().clone() for n, t in plain.model.items()}, folder / f"{MODEL_FILE}.safetensors")
    if plain.masters:
        save_file({n: t.contiguous() for n, t in plain.masters.items()}, folder / f"{MASTERS_FILE}.safetensors")
    if plain.groups:
        tensors = {f"{name}.{entry}": _tensor(v) for name, kept in plain.state.items() for entry, v in kept.items()}
        groups = json.dumps([{"parameters": g.parameters, "hyper": g.hyper} for g in plain.groups])
        told_too = {GROUPS: groups, "elastrain.optimizer": plain.optimizer}
        save_file(tensors, folder / f"{OPTIMIZER_FILE}.safetensors", metadata=told_too)


def _tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.contiguous()
    if value is None:
        raise CheckpointError("an entry of the optimizer's state is None, which safetensors cannot hold: use torch")
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _torch(plain: PlainState, folder: Path) -> None:
    torch.save(plain.model, folder / f"{MODEL_FILE}.pt")
    if plain.masters:
        torch.save(plain.masters, folder / f"{MASTERS_FILE}.pt")
    if plain.groups:
        torch.save(optimizer_state_dict(plain), folder / f"{OPTIMIZER_FILE}.pt")


def _dcp(plain: PlainState, folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    whole: dict[str, Any] = {"model": plain.model}
    if plain.groups:
        whole["optimizer"] = optimizer_state_dict(plain, by_name=True)
    save(whole, checkpoint_id=folder, no_dist=True)


FORMS: dict[str, Callable[[PlainState, Path], None]] = {"safetensors": _safetensors, "torch": _torch, "dcp": _dcp}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


JOB = "imported"


def import_files(
    place: CheckpointPlace,
    models: Sequence[Path],
    optimizer: Path | None = None,
    show: Callable[[int, int], None] = lambda _done_bytes, _size_bytes: None,
) -> Manifest:
    """Make a checkpoint of step -1 of safetensors files: a model (in one file or several), and an optimizer's state.

    The optimizer's file is one that `exporting` writes. `show` is told how many bytes are done, of how many. Raises
    CheckpointError with one sentence.
    """
    model: dict[str, Tensor] = {}
    for path in models:
        found = _read(path)[0]
        if twice := sorted(found.keys() & model):
            raise CheckpointError(f"{twice[0]!r} is in {path}, and in a file before it: one model has it once")
        model |= found
    if not model:
        raise CheckpointError(f"{', '.join(map(str, models)) or 'nothing'}: no tensor is in it")
    state, metadata = _read(optimizer) if optimizer is not None else ({}, {})
    groups = _groups(metadata, optimizer, model, state)
    name = name_of(0, -1)
    size_bytes = sum(tensor.nbytes for tensor in (*model.values(), *state.values()))
    # A safetensors file is read when its numbers are written.
    writer = PartWriter(place, name, writer=JOB, on_size=lambda done_bytes: show(done_bytes, size_bytes))
    try:
        parts: dict[str, tuple[Part, ...]] = {MODEL: (writer.attach(*pack_named(model)),)}
        if optimizer is not None:
            parts[OPTIMIZER] = (writer.attach(*pack_named(state)),)
        writer.finish()
    finally:
        writer.give_up()
    made = _manifest(model, groups, parts, metadata.get("elastrain.optimizer", ""))
    publish(place, made)
    return made


def _manifest(
    model: Mapping[str, Tensor], groups: tuple[GroupEntry, ...], parts: dict[str, tuple[Part, ...]], optimizer: str
) -> Manifest:
    group_of = {name: index for index, group in enumerate(groups) for name in group.parameters}
    parameters = tuple(
        ParameterEntry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            group=group_of.get(name, -1),
        )
        for name, tensor in model.items()
    )
    return Manifest(
        job=JOB,
        life=0,
        step=-1,
        time_s=time.time(),
        spec={},
        counters={},
        optimizer=optimizer,
        parameters=parameters,
        groups=groups,
        shards=(),
        attachments=parts,
    )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    with told(f"reading {path}"):
        path.stat()  # a wrong name is the likelier mistake than a wrong kind of file
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is none of safetensors, and other files of weights can run code when they are loaded: convert it "
            "where you trust it, with safetensors.torch.save_file(torch.load(PATH, weights_only=True), NEW)"
        )
    with told(f"reading {path}"):
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118  # no dict
        except SafetensorError as error:
            raise DamagedError(f"{path} is damaged, or none of safetensors ({error})") from None


def _groups(
    metadata: Mapping[str, str], path: Path | None, model: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> tuple[GroupEntry, ...]:
    if path is None:
        return ()
    try:
        told_groups: Any = json.loads(metadata[GROUPS])
        groups = tuple(GroupEntry(parameters=tuple(g["parameters"]), hyper=dict(g["hyper"])) for g in told_groups)
    except (KeyError, ValueError, TypeError):
        raise CheckpointError(
            f"{path} does not say which parameter groups it belongs to: write it with `elastrain checkpoint export "
            "--format safetensors`, or import the model alone"
        ) from None
    named = [name for group in groups for name in group.parameters]
    unknown = [name for name in (*named, *(key.rpartition(".")[0] for key in state)) if name not in model]
    if unknown:
        raise CheckpointError(f"{path} has state of {unknown[0]!r}, which the model does not have: they do not fit")
    return groups
