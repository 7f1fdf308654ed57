"""The folder of torch's compilers on this node: its place, its variables for workers, and its removal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastrain.base.compile_cache import INDUCTOR, PEERS, TRITON, peers_as_text
from elastrain.base.resume import NodeDisk
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.launcher.shared.process_environment import inherited
from elastrain.launcher.shared.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """The compile cache that all workers of this node use."""

    folder: Path
    """Folder that the launcher removes with the run. A folder that the user has named is used in its place."""
    is_shared: bool = False
    """True if nodes give their caches to one another."""
    peers: Callable[[], Sequence[NodeRecord]] = tuple
    """Returns the records of the other nodes."""

    @property
    def given(self) -> Path | None:
        """Folder that other nodes may read, or None."""
        return self._used if self.is_shared else None

    @property
    def _used(self) -> Path:
        return Path(inherited(INDUCTOR) or self.folder)

    def environment(self) -> dict[str, str]:
        """Return the variables of a worker. In a folder that the user has named, inductor places Triton's cache."""
        told = {INDUCTOR: str(self._used), PEERS: ""}
        if not inherited(INDUCTOR):
            told[TRITON] = inherited(TRITON) or str(self.folder / "triton")
        if self.is_shared:
            nodes = [NodeDisk(node=each.name, door=each.signature, endpoint=each.endpoint) for each in self.peers()]
            told[PEERS] = peers_as_text([each for each in nodes if each.endpoint])
        return told


def folder_of(run: RunDir) -> Path:
    """Return the folder of this launcher's process. A node that starts again has another one."""
    return run.path / f"compile-cache-{os.getpid()}"


def remove(run: RunDir) -> None:
    """Remove the folder, if there is one."""
    shutil.rmtree(folder_of(run), ignore_errors=True)


@contextmanager
def kept_unless_broken(run: RunDir, guardian: Guardian) -> Iterator[None]:
    """Remove the folder if the body raises or its process dies. Otherwise the job's next life uses it."""
    guardian.remove(folder_of(run))
    try:
        yield
    except BaseException:
        remove(run)
        raise
