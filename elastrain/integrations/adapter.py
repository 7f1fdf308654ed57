"""Parts of all adapters: checks of the library and of the process, and the script's own checkpoint.

A library has to have a version that the adapter knows, and a process uses at most one adapter. All members of a job
begin from the same checkpoint, also those that join later.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch

from elastrain.base.environment import resume, run_folder
from elastrain.errors import ConfigError
from elastrain.runtime.job import Job
from elastrain.runtime.loop_state.own_checkpoint import OwnCheckpoint

LINKED_BYTES = 1 << 20
"""Size from which on a file of a checkpoint is linked and not copied."""
_claimed: str | None = None
"""The adapter that this process uses, once it uses one."""


def require(library: str, minimum: str) -> ModuleType:
    """Import the adapter's library and return it.

    Args:
        library: Name of the package, which is also the name of its module.
        minimum: The oldest version that the adapter works with, such as "1.15".

    Raises:
        ConfigError: The library is not installed, or it is too old.
    """
    try:
        found = version(library)
    except PackageNotFoundError:
        raise ConfigError(
            f"elastrain.integrations.{library} needs the package {library}: pip install '{library}>={minimum}'"
        ) from None
    if _numbers(found) < _numbers(minimum):
        raise ConfigError(
            f"elastrain.integrations.{library} needs {library} {minimum} or newer, and {found} is installed: "
            f"pip install '{library}>={minimum}'"
        )
    return import_module(library)


def claim(adapter: str) -> None:
    """Note that this process uses the adapter. Raises ConfigError if it uses another one already.

    Args:
        adapter: Name of the adapter's class with its module, such as "elastrain.integrations.accelerate.Accelerator".
    """
    global _claimed
    if _claimed not in (None, adapter):
        raise ConfigError(
            f"this process uses {_claimed} already, and {adapter} would be a second job in it: use one adapter in a "
            "script"
        )
    _claimed = adapter


def kept_checkpoint(given: str | os.PathLike[str]) -> str:
    """Return a path of what the script's checkpoint was when the first member of this job has read it.

    The script may delete or replace the checkpoint while the job trains, and a member that joins later reads it, too.
    So it is kept in the run's folder by links to its files. Without a launcher, and for a URL, the path stays as it is.
    """
    run, path = run_folder(), Path(given)
    if run is None or "://" in str(given):
        return os.fspath(given)
    place = run / "begun_from" / hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]
    if not place.exists() and path.exists():
        mine = place.with_suffix(f".{os.getpid()}")
        mine.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, mine / path.name, copy_function=_linked)
        else:
            _linked(path, mine / path.name)
        try:
            mine.rename(place)
        except OSError:  # another member was faster
            shutil.rmtree(mine)
    return str(place / path.name if place.exists() else path)


def _linked(source: str | Path, target: str | Path) -> None:
    try:
        if os.stat(source).st_size < LINKED_BYTES:  # it may be written anew in place, and tells where training stands
            raise OSError
        os.link(source, target)
    except OSError:  # or the run's folder is on another disk
        shutil.copy2(source, target)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version: (5, 23, 0) of "5.23.0.dev1"."""
    found: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def current_device(*, cpu: bool = False) -> torch.device:
    """Return the device that the job has chosen for this worker: the current accelerator's, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() and not cpu else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def begin_behind(job: Job, made: int) -> int:
    """Say how many steps the checkpoint has made that the library has loaded; 0 without one. Call it before `prepare`.

    If the job resumes as well, it begins from the newer checkpoint. Returns the steps that come before its step 0.
    """
    job.register("the script's own checkpoint", own := OwnCheckpoint(made, resume()))
    return own.behind
