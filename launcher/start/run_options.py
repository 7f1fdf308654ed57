"""What was asked for on the command line of `elastrain run`, checked: plain values."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import Logs, Script, WorkerWish
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.shared.job_values import JobConfig, Least, Life
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.shared.times import HangTimes, JobTimes, LeaveTimes
from elastrain.launcher.store.etcd_connection import EtcdConfig

_FIRST = Life()
AUTO, NONE = "auto", "none"
KEY_TTL_S = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """How many nodes and workers, and how many of these may be started again."""

    workers: int = 1
    """On this node."""
    nodes_min: int = 1
    nodes_max: int = 1
    max_restarts: int = 10


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long is waited for what, in seconds."""

    join_timeout_s: float = 120.0
    last_call_s: float = 5.0
    stop_grace_s: float = 5.0
    last_checkpoint_s: float = 30.0
    """Where durable checkpoints are written."""
    park_timeout_s: float = 3600.0
    hang_timeout_s: float = 2.5
    key_ttl_s: float = KEY_TTL_S


@dataclass(frozen=True, kw_only=True)
class StartWish:
    """What a job is to start from."""

    source: str = AUTO
    """AUTO: the newest good checkpoint, if there is one; NONE: nothing; else where a checkpoint lies."""
    accepts_changes: bool = False
    """Also where the job is another than the one that wrote it."""
    is_thorough: bool = False
    """Every byte is looked at before it is chosen: the last choice turned out to be damaged, perhaps."""
    since: str = ""
    """The checkpoint that the job's first life was told to go back to: what others wrote after it is left behind."""

    @property
    def named(self) -> str:
        """The name of the checkpoint, where one was named rather than the newest of a folder; in a later life, too."""
        name = self.source.rstrip("/").rpartition("/")[2]
        return self.since or (name if name.startswith("life-") else "")


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """Where the run's files and its workers' output go. `redirects` and `tee`: see `Logs`."""

    run_dir: Path | None = None
    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    shows_progress: bool = True
    """Of long work; several nodes may share a screen."""

    def with_own_log_dir(self, job: str) -> OutputPlan:
        """As under torchrun, each run has a folder of its own in --log-dir, named after the job. Raises ConfigError."""
        if self.log_dir is None:
            return self
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            return replace(self, log_dir=Path(tempfile.mkdtemp(prefix=f"{job}_", dir=self.log_dir)))
        except OSError as error:
            raise ConfigError(f"no folder can be made in --log-dir {self.log_dir}: {error}") from None

    def logs(self, run: RunDir) -> Logs:
        return Logs(folder=(self.log_dir or run.logs).absolute(), redirects=self.redirects, tee=self.tee)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One run of the command, whether it is the whole job or one node of it."""

    job: str
    script: Script
    target: str
    """The script as it was named: what all nodes of a job have in common."""
    size: JobSize = JobSize()
    output: OutputPlan = OutputPlan()
    wish: WorkerWish = field(default_factory=WorkerWish)
    waits: Waits = Waits()
    armed: bool = False
    faults: tuple[Fault, ...] = ()
    began_s: float = 0.0
    """When the command began, monotonic."""

    checkpoints: CheckpointOptions | None = None
    """Where durable checkpoints are, and how they are written, if the job has any."""
    resume: StartWish = StartWish()

    @property
    def checkpoint_dir(self) -> str | None:
        """Folder or URL."""
        return self.checkpoints.place if self.checkpoints is not None else None

    def config(self, *, node: str | None = None, incarnation: int = 0, life: Life = _FIRST) -> JobConfig:
        """For the core. `node`: this one's name among several; None: it is the only one."""
        waits, size = self.waits, self.size
        times = JobTimes(
            join_timeout_s=waits.join_timeout_s, last_call_s=waits.last_call_s, park_timeout_s=waits.park_timeout_s
        )
        alone = JobConfig(
            workers=size.workers,
            max_restarts=size.max_restarts,
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
        # A job that has begun needs no least number of nodes to go on: neither does one that goes on from a checkpoint.
        least = Least(nodes=size.nodes_min, members=self.wish.stages or 1) if life.number == 1 else Least()
        return replace(alone, node=node, incarnation=incarnation, least=least, nodes_max=size.nodes_max)

    def faults_from(self, now: float) -> tuple[Fault, ...]:
        """Those whose time has not passed: a node that is started again must not be struck by the old ones at once."""
        return tuple(f for f in self.faults if f.place.t_s is None or self.began_s + f.place.t_s > now)

    def started_again(self) -> RunOptions:
        """For a node that was lost: what strikes a whole node in any step would strike each new start of it."""
        return replace(self, faults=tuple(f for f in self.faults if not f.strikes_any_step_of_a_node))

    def in_a_later_life(self) -> RunOptions:
        """Steps are done again: what has struck in one of them must not strike in each life.

        Whatever the first life was to start from, a later one goes on from the newest checkpoint that is whole: of its
        own job's, where the first one was told to go back to an older one.
        """
        later = replace(self.resume, source=AUTO, is_thorough=True, since=self.resume.named)
        checkpoints = self.checkpoints.started_from() if self.checkpoints is not None else None
        faults = tuple(f for f in self.faults if f.place.t_s is not None)
        return replace(self, faults=faults, resume=later, checkpoints=checkpoints)

    def on_simulated_node(self, node: str) -> RunOptions:
        """Where disks are local, it has a folder of its own. All share a screen: one shows how long work goes on."""
        output = replace(self.output, shows_progress=node == "node0")
        checkpoints = self.checkpoints.on_node(node) if self.checkpoints is not None else None
        return replace(self, output=output, checkpoints=checkpoints)

    def with_own_log_dir(self) -> RunOptions:
        """Raises ConfigError."""
        return replace(self, output=self.output.with_own_log_dir(self.job))


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What one node of several needs beside that. `host`: its address for others; None: all are on this machine."""

    name: str
    etcd: EtcdConfig
    secret_file: Path
    host: str | None
    has_own_store: bool = False
    """The store was made for this job just now: that it has no history tells nothing."""
