"""A plain state dict as a checkpoint with which a job can begin: step -1, no shards, tensors by name.

Read from safetensors alone: a torch file is a pickle, which can run code, and nothing here loads such a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, told
from elastrain.snapshot.durable.exporting import GROUPS
from elastrain.snapshot.durable.manifest import MODEL, OPTIMIZER, GroupEntry, Manifest, ParameterEntry, Part, name_of
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.plain import pack_named
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.writing import PartWriter

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
