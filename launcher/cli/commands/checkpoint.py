"""Commands `elastrain checkpoint ls | verify | show | export | import`: durable checkpoints without a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.shared.console import ProgressBar, print_table, say
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import VERIFIED, Manifest
from elastrain.snapshot.durable.places.port import CheckpointPlace, checkpoint_at, place_at
from elastrain.snapshot.durable.publishing import try_out
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import candidates

Places = Annotated[
    list[str],
    typer.Argument(
        metavar="PLACE...",
        help="The --checkpoint-dir (on local disks: that of each node), a checkpoint's folder in it, or an fsspec URL.",
    ),
]
Name = Annotated[str | None, typer.Option("--checkpoint", help="The checkpoint's name; default: the newest.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def list_checkpoints(places: Places, as_json: Json = False) -> int:
    """List the checkpoints, the newest first.

    Each is checked quickly: its manifest, its files and their sizes.
    """
    with _sentences():
        where, _ = _found(places)
        rows = [_row(where, name) for name in candidates(where)]
    if as_json:
        print(json.dumps({"checkpoints": rows}))
    elif not rows:
        say(f"there is no checkpoint in {_named(where)}")
    else:
        columns = ("checkpoint", "step", "age", "bytes", "state")
        print_table(columns, [(row["name"], *_cells(row)) for row in rows])
    return 0


def verify_checkpoints(
    places: Places,
    name: Name = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint in it.")] = False,
    as_json: Json = False,
) -> int:
    """Read every byte of a checkpoint back and compare it with checksums and digests. Exit code 1 if any is wrong."""
    with _sentences():
        where, named = _found(places)
        newest = _chosen(where, name or named)
        names = candidates(where) if every else [newest]
        found = {each: _verified(where, each) for each in names}
    if as_json:
        problems = {each: told for each, (told, _) in found.items()}
        print(json.dumps({"problems": problems, "here": {each: here for each, (_, here) in found.items() if here}}))
    else:
        for each, (told, here) in found.items():
            words = [*([] if told else ["good"]), *([here] if here else [])]
            print("\n  ".join([f"{each}: {', '.join(words)}".rstrip(), *told]))
    return 1 if any(told for told, _ in found.values()) else 0


def show_checkpoint(places: Places, name: Name = None, as_json: Json = False) -> int:
    """Show what is in a checkpoint: its job, step, counters, spec, parameters and files."""
    with _sentences():
        where, named = _found(places)
        checkpoint = Checkpoint.open(where, _chosen(where, name or named))
        problems = checkpoint.look()
    here = {"here": told} if (told := parts_here(checkpoint)) else {}
    shown = {**_summary(checkpoint.manifest), **here, "problems": problems}
    if as_json:
        print(json.dumps(shown))
        return 0
    for key, value in shown.items():
        lines = _lines(value) or ["-"]
        print(f"\n{'':<13}".join([f"{key:<12} {lines[0]}", *lines[1:]]))
    return 0


def export_checkpoint(
    places: Places,
    out: Annotated[Path, typer.Option("--out", help="The new folder to write.")],
    form: Annotated[str, typer.Option("--format", help="safetensors, torch or dcp.")] = "safetensors",
    name: Name = None,
    as_json: Json = False,
) -> int:
    """Write model and optimizer as files that plain PyTorch, safetensors or torch.distributed.checkpoint load."""
    from elastrain.snapshot.durable.conversion import FORMS, export
    from elastrain.snapshot.durable.plain import gather

    if form not in FORMS:
        raise ConfigError(f"--format {form!r}: it is one of {', '.join(FORMS)}")
    if os.path.lexists(out):
        raise ConfigError(f"--out {out} is there already, and nothing is overwritten: name another folder")
    with _sentences():
        where, named = _found(places)
        checkpoint = Checkpoint.open(where, _chosen(where, name or named))
        if lacking := parts_here(checkpoint):
            raise ConfigError(f"{checkpoint.manifest.name}: {lacking}")
        try_out(place_at(str(out.absolute().parent)))  # before anything large is read
        with closing(ProgressBar(f"reading {checkpoint.manifest.name}", checkpoint.manifest.size_bytes)) as bar:
            plain = gather(replace(checkpoint, on_bytes=bar.advance))
        with closing(ProgressBar(f"writing {out}", plain.nbytes)) as bar:
            files = export(plain, out, form, lambda done: bar.show(done, plain.nbytes))
            bar.show(plain.nbytes, plain.nbytes)
    told = {"checkpoint": checkpoint.manifest.name, "step": checkpoint.manifest.step, "files": [str(f) for f in files]}
    print(json.dumps(told) if as_json else "\n".join(map(str, files)))
    return 0


def import_state(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="safetensors files of one model.")],
    into: Annotated[str, typer.Option("--into", help="The place of the new checkpoint; `--resume` takes it.")],
    optimizer: Annotated[
        Path | None, typer.Option("--optimizer", help="The optimizer's state, as `export` writes it for safetensors.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Make a checkpoint of a plain state dict, with which a job begins: `elastrain run --resume PLACE`."""
    from elastrain.snapshot.durable.conversion import import_files

    with _sentences():
        place = place_at(into)
        if into.startswith("memory://"):
            raise ConfigError(f"--into {into}: it would be gone with this command: name a folder or a store's URL")
        if candidates([place]):
            raise ConfigError(f"--into {into} holds checkpoints already: name another one")
        with closing(ProgressBar(f"importing {', '.join(each.name for each in models)}")) as bar:
            made = import_files(place, models, optimizer, bar.show)
    print(json.dumps(_summary(made)) if as_json else f"{into}/{made.name}: {len(made.parameters)} tensors")
    return 0


@contextmanager
def _sentences() -> Iterator[None]:
    """Map errors to exit codes: damaged or unreadable checkpoints end with 1, all other errors with 2."""
    try:
        yield
    except DamagedError as error:
        raise ElastrainError(str(error)) from error
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _found(locations: Sequence[str]) -> tuple[list[CheckpointPlace], str | None]:
    """Return the places, and the name of the checkpoint if a location names one.

    Raises ConfigError if a place does not exist.
    """
    pairs = [checkpoint_at(location) for location in locations]
    missing = [place.location for place, _ in pairs if not place.exists()]
    if missing:
        found = f"{missing[0]} is a file" if Path(missing[0]).is_file() else f"there is no folder {missing[0]}"
        raise ConfigError(f"{found}: name the --checkpoint-dir of a job, or a folder in it")
    return [place for place, _ in pairs], next((name for _, name in pairs if name is not None), None)


def _chosen(places: Sequence[CheckpointPlace], name: str | None) -> str:
    names = candidates(places)
    if name is None and not names:
        raise ConfigError(f"there is no checkpoint in {_named(places)}")
    if name is not None and name not in names:
        raise ConfigError(f"there is no checkpoint {name!r}: there are {', '.join(names) or 'none'}")
    return name or names[0]


def _named(places: Sequence[CheckpointPlace]) -> str:
    return " and ".join(place.location for place in places)


def parts_here(checkpoint: Checkpoint) -> str:
    """Return "3 of 8 parts are here: …" if parts of a checkpoint on local disks are missing, else ""."""
    lacking = checkpoint.lacking() if checkpoint.manifest.is_spread else []
    if not lacking:
        return ""
    manifest = checkpoint.manifest
    count = len(manifest.shards) + len(manifest.attachments)
    return f"{count - len(lacking)} of {count} parts are here: name the directories of the other nodes, too"


def _row(places: Sequence[CheckpointPlace], name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "step": None, "time_s": None, "bytes": None, "verified": False}
    try:
        checkpoint = Checkpoint.open(places, name)
        problems = checkpoint.look()
    except CheckpointError as error:
        return {**row, "problems": [str(error)]}
    manifest, verified = checkpoint.manifest, any(VERIFIED in place.names(name) for place in places)
    row |= {"step": manifest.step, "time_s": manifest.time_s, "bytes": manifest.size_bytes, "verified": verified}
    return {**row, "problems": problems, "here": parts_here(checkpoint)}


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str]:
    good = row.get("here") or ("verified" if row["verified"] else "complete")
    state = row["problems"][0] if row["problems"] else good
    if row["step"] is None:
        return "-", "-", "-", state
    return str(row["step"]), _age(time.time() - row["time_s"]), f"{row['bytes']:,}", state


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _verified(places: Sequence[CheckpointPlace], name: str) -> tuple[list[str], str]:
    """Return the problems of a checkpoint, and the text of `parts_here`."""
    try:
        checkpoint = Checkpoint.open(places, name)
        with closing(ProgressBar(f"verifying {name}", checkpoint.size_here_bytes)) as bar:
            return replace(checkpoint, on_bytes=bar.advance).verify(), parts_here(checkpoint)
    except CheckpointError as error:
        return [str(error)], ""


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint": manifest.name,
        "job": manifest.job,
        "life": manifest.life,
        "step": manifest.step,
        "time_s": manifest.time_s,
        "bytes": manifest.size_bytes,
        "plain_bytes": manifest.plain_bytes,
        "optimizer": manifest.optimizer,
        "counters": manifest.counters,
        "changes": list(manifest.changes),
        "spec": manifest.spec,
        "shards": len(manifest.shards),
        "parameters": {p.name: f"{p.dtype}{list(p.shape)}" for p in manifest.parameters},
        "files": sorted(manifest.files),
    }


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key}: {each}" for key, each in value.items()]
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]
