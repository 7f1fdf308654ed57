"""Options that `elastrain run` takes from Slurm inside `srun`. The user's own flags take precedence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.node_options import RendezvousFlags, SizeFlags
from elastrain.launcher.schedulers.job_place import JobPlace, node_address, place_in
from elastrain.launcher.schedulers.slurm import SlurmTask


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Options of `run` with what Slurm adds. `run_dir`: the run's folder, or None for the default one."""

    size: SizeFlags
    rendezvous: RendezvousFlags
    run_dir: Path | None = None


def from_slurm(size: SizeFlags, rendezvous: RendezvousFlags, task: SlurmTask | None) -> Completed:
    """Return the options, completed by those of the task if this is one.

    Raises ConfigError if several nodes are asked for and the job has no hosts for its quorum.
    """
    if task is None or size.standalone or size.local_nodes is not None:
        return Completed(size=size, rendezvous=rendezvous)
    has_store = rendezvous.rdzv_endpoint is not None or rendezvous.join is not None
    place = None if has_store else place_in(Path(task.folder))
    if not has_store and place is None:
        if size.nnodes == "1":
            return Completed(size=size, rendezvous=rendezvous)
        raise ConfigError(
            f"--nnodes {size.nnodes}, and there is no job {task.job} in {task.folder}: start it by "
            "`elastrain launch slurm`, or give --join HOST[,HOST,HOST] or --rdzv-endpoint HOST:PORT (an etcd)"
        )
    if place is not None and size.nnodes == "1" and not size.spares:
        size = replace(size, nnodes=place.nnodes, spares=place.spares)
    completed = replace(
        rendezvous,
        rdzv_id=rendezvous.rdzv_id or task.job,
        node_name=rendezvous.node_name or task.node,
        secret_file=rendezvous.secret_file or Path(task.folder) / "secret",
    )
    if place is not None:
        completed = _joining(completed, place, task.node)
    return Completed(size=size, rendezvous=completed, run_dir=_unused(Path(task.run_dir)))


def _unused(folder: Path) -> Path:
    """Return the folder, or one beside it if a task that Slurm lost on this node has left its run there."""
    others = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain((folder,), others) if not each.exists())


def _joining(rendezvous: RendezvousFlags, place: JobPlace, node: str) -> RendezvousFlags:
    """Return the options with the quorum's hosts, and with this node's address as Slurm knows it."""
    address = rendezvous.local_addr
    if address is None and rendezvous.interface is None:
        address = place.hosts.get(node) or node_address(node)
    return replace(rendezvous, join=place.join(with_port=rendezvous.port_range is None), local_addr=address)
