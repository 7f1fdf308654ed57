"""A checkpoint as files that plain PyTorch, `safetensors` alone, and `torch.distributed.checkpoint` load."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elastrain.base.held_folder import held_folder
from elastrain.snapshot.durable.errors import CheckpointError, TakenError, told
from elastrain.snapshot.durable.plain import PlainState, optimizer_state_dict

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
