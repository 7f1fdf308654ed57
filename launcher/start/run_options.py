"""Checked options of `elastrain run`, as plain values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.errors import ConfigError
from elastrain.launcher.agent.adopted import AdoptedRanks
from elastrain.launcher.agent.worker_start import Logs, Script, WorkerWish
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.shared.job_values import JobConfig, Life
from elastrain.launcher.shared.places import Least, NodePlaces, QuarantineRule
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.shared.times import HangTimes, JobTimes, LeaveTimes
from elastrain.launcher.store.etcd_config import EtcdConfig

_FIRST = Life()
AUTO, NONE = "auto", "none"
KEY_TTL_S = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """Number of nodes and workers, and the number of restarts of workers."""

    workers: int = 1
    """Number of workers on this node."""
    nodes_min: int = 1
    nodes_max: int = 1
    spares: int = 0
    """Number of nodes beyond `nodes_max` that wait for a place."""
    max_restarts: int | None = None
    quarantine: QuarantineRule | None = None
    standby: bool = False
    """True if each node keeps a waiting worker."""

    @property
    def terms(self) -> str:
        """The numbers of nodes, on which all nodes of a job agree."""
        spares = f" and {self.spares} spares" if self.spares else ""
        return f"{self.nodes_min}:{self.nodes_max}{spares}"

    @property
    def described(self) -> str:
        """The number of nodes at most, in words: "3 nodes and 1 spare"."""
        spares = f" and {self.spares} spare{'s' * (self.spares > 1)}" if self.spares else ""
        return f"{self.nodes_max} node{'s' * (self.nodes_max > 1)}{spares}"

    @property
    def all_nodes(self) -> int:
        """Number of nodes with the spares, at most."""
        return self.nodes_max + self.spares


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Timeouts of a job, in seconds."""

    join_timeout_s: float = 120.0
    last_call_s: float = 5.0
    stop_grace_s: float = 5.0
    last_checkpoint_s: float = 30.0
    """Limit for one last checkpoint, if durable checkpoints are written."""
    park_timeout_s: float = 3600.0
    hang_timeout_s: float = 2.5
    key_ttl_s: float = KEY_TTL_S


@dataclass(frozen=True, kw_only=True)
class StartWish:
    """The user's choice of the checkpoint to start from."""

    source: str = AUTO
    """AUTO: the newest good checkpoint, if there is one; NONE: a fresh start; else the location of a checkpoint."""
    accepts_changes: bool = False
    """True if the job may differ from the one that wrote the checkpoint."""
    is_thorough: bool = False
    """True if every byte is read before a checkpoint is chosen, because the last choice may have been damaged."""
    since: str = ""
    """Checkpoint to which the first life was told to go back. Newer checkpoints of other jobs are ignored."""

    @property
    def named(self) -> str:
        """Name of the checkpoint if the user named one instead of a folder, else "". Later lives keep it."""
        name = self.source.rstrip("/").rpartition("/")[2]
        return self.since or (name if name.startswith("life-") else "")


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """NodePlaces for the run's files and its workers' output. `redirects` and `tee`: see `Logs`."""

    run_dir: Path | None = None
    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    shows_progress: bool = True
    """True if progress of long work is shown. Set for one node if several share a screen."""

    def with_own_log_dir(self, job: str) -> OutputPlan:
        """Return the plan with a new folder in --log-dir, named after the job as in torchrun. Raises ConfigError."""
        if self.log_dir is None:
            return self
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            return replace(self, log_dir=Path(tempfile.mkdtemp(prefix=f"{job}_", dir=self.log_dir)))
        except OSError as error:
            raise ConfigError(f"no folder can be made in --log-dir {self.log_dir}: {error}") from None

    def logs(self, run: RunDir) -> Logs:
        """Return the workers' logs, in the run's folder if there is no --log-dir."""
        return Logs(folder=(self.log_dir or run.logs).absolute(), redirects=self.redirects, tee=self.tee)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one `elastrain run`, which is the whole job or one node of it."""

    job: str
    script: Script | AdoptedRanks
    """The source of the workers: a script, or ranks that another launcher has started."""
    target: str
    """The script as the user named it, which all nodes of a job have in common."""
    size: JobSize = JobSize()
    output: OutputPlan = OutputPlan()
    wish: WorkerWish = field(default_factory=WorkerWish)
    waits: Waits = Waits()
    armed: bool = False
    faults: tuple[Fault, ...] = ()
    began_s: float = 0.0
    """Monotonic time at which the command began."""

    checkpoints: CheckpointOptions | None = None
    """Place and schedule of durable checkpoints, or None if the job writes none."""
    resume: StartWish = StartWish()

    @property
    def are_ranks_adopted(self) -> bool:
        """True if another launcher has started the workers. No other life can follow then."""
        return isinstance(self.script, AdoptedRanks)

    @property
    def checkpoint_dir(self) -> str | None:
        """Folder or URL of durable checkpoints, or None."""
        return self.checkpoints.place if self.checkpoints is not None else None

    def config(self, *, node: str | None = None, incarnation: int = 0, life: Life = _FIRST) -> JobConfig:
        """Return the configuration for `core`. `node`: this node's name among several, or None for the only node."""
        waits, size = self.waits, self.size
        times = JobTimes(
            join_timeout_s=waits.join_timeout_s, last_call_s=waits.last_call_s, park_timeout_s=waits.park_timeout_s
        )
        alone = JobConfig(
            workers=size.workers,
            max_restarts=size.max_restarts,
            places=NodePlaces(quarantine=size.quarantine),
            armed=self.armed,
            began_s=self.began_s,
            times=times,
            hangs=HangTimes(hang_timeout_s=waits.hang_timeout_s),
            life=life,
            leave=LeaveTimes(
                hand_over_s=waits.stop_grace_s,
                last_checkpoint_s=waits.last_checkpoint_s if self.checkpoints is not None else 0.0,
            ),
        )
        if node is None:
            return alone
        # A running job continues with any number of nodes, and so does a later life of it.
        least = Least(nodes=size.nodes_min, members=self.wish.least_members) if life.is_first else Least()
        places = NodePlaces(
            nodes=size.nodes_max, spares=size.spares, quarantine=size.quarantine, are_fixed=self.are_ranks_adopted
        )
        return replace(alone, node=node, incarnation=incarnation, least=least, places=places)

    def faults_from(self, now: float) -> tuple[Fault, ...]:
        """Return the faults whose time has not passed.

        A restarted node must not be struck at once by faults of the past.
        """
        return tuple(f for f in self.faults if f.place.t_s is None or self.began_s + f.place.t_s > now)

    def started_again(self) -> RunOptions:
        """Return the options for a node that is restarted after its loss.

        Faults that strike a whole node in any step are left out, because they would strike each new start of it.
        """
        return replace(self, faults=tuple(f for f in self.faults if not f.strikes_any_step_of_a_node))

    def in_a_later_life(self) -> RunOptions:
        """Return the options for a later life.

        Faults at steps are left out, because steps are repeated and each life would be struck. The life resumes from
        the newest complete checkpoint. If the first life was told to go back to an older one, only this job's
        checkpoints count.
        """
        later = replace(self.resume, source=AUTO, is_thorough=True, since=self.resume.named)
        checkpoints = self.checkpoints.started_from() if self.checkpoints is not None else None
        faults = tuple(f for f in self.faults if f.place.t_s is not None)
        return replace(self, faults=faults, resume=later, checkpoints=checkpoints)

    def on_simulated_node(self, node: str) -> RunOptions:
        """Return the options for a simulated node.

        With local disks it has its own checkpoint folder. Only node0 shows progress, because all nodes share a screen.
        """
        output = replace(self.output, shows_progress=node == "node0")
        checkpoints = self.checkpoints.on_node(node) if self.checkpoints is not None else None
        return replace(self, output=output, checkpoints=checkpoints)

    def with_own_log_dir(self) -> RunOptions:
        """Return the options with a new folder in --log-dir. Raises ConfigError."""
        return replace(self, output=self.output.with_own_log_dir(self.job))


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of one node among several.

    `host`: its address for other nodes, or None if all nodes are on this machine.
    """

    name: str
    etcd: EtcdConfig
    secret_file: Path
    host: str | None
    has_own_store: bool = False
    """True if the store was just created for this job, so that its missing history is no sign of data loss."""
