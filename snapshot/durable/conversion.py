"""Conversion between checkpoints and files of plain PyTorch, `safetensors`, and `torch.distributed.checkpoint`.

`export` writes a checkpoint as such files. `import_files` makes a checkpoint that a job can start from: step -1, no
shards, tensors by name. It reads safetensors only, because a torch file is a pickle, which can run code when loaded.
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
"""Key in the metadata of an optimizer's safetensors file. The value is its parameter groups as JSON."""
_LOOK_S = 0.2
"""Seconds between two looks at the size of the files that are being written."""


def export(plain: PlainState, out: Path, form: str, on_bytes: Callable[[int], None] = lambda _: None) -> list[Path]:
    """Write a state into the new folder `out`, completely or not at all.

    Args:
        plain: The state to write.
        out: The folder to create.
        form: A key of FORMS.
        on_bytes: Called by another thread with the number of bytes written so far.

    Returns:
        The files, sorted.

    Raises:
        TakenError: If `out` exists.
        CheckpointError: If it cannot be written.
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
    """Report the size of the folder to `on_bytes` while the block runs.

    The libraries that write the files do not report their progress.
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            with suppress(OSError):  # a file may have been renamed meanwhile
                # Libraries may set the size of a file in advance. Allocated blocks show what is written.
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

    # Tied parameters share memory under two names, which safetensors refuses. Each name gets its own copy.
    save_file({n: t.contiguous().clone() for n, t in plain.model.items()}, folder / f"{MODEL_FILE}.safetensors")
    if plain.masters:
        save_file({n: t.contiguous() for n, t in plain.masters.items()}, folder / f"{MASTERS_FILE}.safetensors")
    if plain.groups:
        tensors = {f"{name}.{entry}": _tensor(v) for name, kept in plain.state.items() for entry, v in kept.items()}
        groups = json.dumps([{"parameters": g.parameters, "hyper": g.hyper} for g in plain.groups])
        told_too = {GROUPS: groups, "elastrain.optimizer": plain.optimizer}
        save_file(tensors, folder / f"{OPTIMIZER_FILE}.safetensors", metadata=told_too)


def _tensor(value: object) -> Tensor:
    """Return a value of the optimizer's state as a tensor. Raises CheckpointError for None."""
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
"""Format name -> function that writes a state into a folder."""


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


JOB = "imported"
"""Job id of imported checkpoints."""


def import_files(
    place: CheckpointPlace,
    models: Sequence[Path],
    optimizer: Path | None = None,
    show: Callable[[int, int], None] = lambda _done_bytes, _size_bytes: None,
) -> Manifest:
    """Make a checkpoint of step -1 from safetensors files.

    Args:
        place: The place to write to.
        models: The files of one model. No tensor may be in two of them.
        optimizer: The optimizer's state, in a file that `export` wrote.
        show: Called with the bytes done, and with the bytes in total.

    Returns:
        The manifest of the new checkpoint.

    Raises:
        CheckpointError: If a file cannot be used or the checkpoint cannot be written. The text is one sentence.
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
    # Safetensors reads a file lazily, so the progress of writing is also the progress of reading.
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
    """Return tensors and metadata of a safetensors file."""
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
    """Return the parameter groups in the metadata of an optimizer's file; empty without such a file."""
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
