"""Start and end of worker processes, their logs, and their environment, which is torchrun's and more.

The agent does not import torch. `core` decides when to start or end which worker.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.processes import tied
from elastrain.base.resume import as_text
from elastrain.base.told_devices import CUBLAS_CONFIG, CUBLAS_CONFIG_DEFAULT
from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.node_cache import CompileCache
from elastrain.launcher.shared.job_values import JobConfig, Start
from elastrain.launcher.shared.process_environment import inherited, without
from elastrain.launcher.shared.screen import ScreenPipe

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TORCH_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
MEMORY_LIMIT, OFFLOAD_DIRS, STAGES = "ELASTRAIN_MEMORY_LIMIT", "ELASTRAIN_OFFLOAD_DIRS", "ELASTRAIN_STAGES"
STANDING_SHADOWS = "ELASTRAIN_STANDING_SHADOWS"
HOST_MEMORY_LIMIT, HOST_TIER = "ELASTRAIN_HOST_MEMORY_LIMIT", "ELASTRAIN_HOST_TIER"
PORTS = "ELASTRAIN_PORT_RANGE"
_TORCH_SIGNALS_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@dataclass(frozen=True, kw_only=True)
class Script:
    """The command that every worker runs."""

    command: str
    args: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    """Kind (`file` or `module`), script and arguments for a waiting worker. Empty for a program of its own."""

    @staticmethod
    def of(target: str, args: Sequence[str], *, module: bool = False, python: bool = True) -> Script:
        """Return torchrun's form: `python -u script args…`, `python -u -m module args…`, or the program itself."""
        if not python:
            return Script(command=target, args=tuple(args))
        waiting = ("module" if module else "file", target, *args)
        command = ("-u", *(("-m",) if module else ()), target, *args)
        return Script(command=sys.executable, args=command, waiting=waiting)

    def start(self, worker: Start, common: WorkerEnvironment, logs: Logs) -> WorkerProcess:
        """Start one worker. Raises OSError if it cannot."""
        return start(worker, self, common, logs)

    def refill(self) -> None:
        """Do nothing: no process waits."""

    def close(self) -> None:
        """Do nothing: no process waits."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Places for output. `redirects` and `tee` are bit masks per slot: 1 standard output, 2 standard error."""

    folder: Path
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)


class WorkerProcess:
    """One started worker. `pidfd` is readable once it has ended."""

    is_standby = False

    def __init__(self, process: subprocess.Popen[bytes], logs: Sequence[ScreenPipe] = ()) -> None:
        self._process, self._logs = process, logs
        self.pid = process.pid
        self.session: int | None = self.pid
        self.pidfd = os.pidfd_open(self.pid)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and all processes of its group.

        Safe until `reap`, because the process id cannot be reused before.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kill the rest of the process group, and return the exit code (< 0: minus the signal).

        Call this after `pidfd` is readable.
        """
        self.signal_group(signal.SIGKILL)
        exit_code = self._process.wait()
        os.close(self.pidfd)
        return exit_code

    def close(self) -> None:
        """Write the last lines of its logs, and close them."""
        for log in self._logs:
            log.close()


def start(worker: Start, script: Script, common: WorkerEnvironment, logs: Logs) -> WorkerProcess:
    """Start one worker in a session of its own, which ends with this thread. Raises OSError if it cannot."""
    files = _MemberLogs(logs, worker.member, worker.slot)
    try:
        process = subprocess.Popen(
            tied([script.command, *script.args]),
            env=without(_ERROR_FILE) | files.variables() | environment(common, worker),
            stdout=files.open(1),
            stderr=files.open(2),
            start_new_session=True,
        )
    finally:
        for log in files.carried:
            os.close(log.into)
    if worker.warm_up:
        worker_limits.lower(process.pid)
    return WorkerProcess(process, files.carried)


def error_file(logs: Logs, worker: Start) -> str:
    """Return the path of a worker's error.json, in a new folder of its own."""
    return _MemberLogs(logs, worker.member, worker.slot).variables()[_ERROR_FILE]


class _MemberLogs:
    """A new folder of a member: error.json, and stdout.log and stderr.log if requested."""

    def __init__(self, logs: Logs, member: str, slot: int) -> None:
        self._folder, self._member = logs.folder / member, member
        self._tee = logs.tee.get(slot, 0)
        self._redirects = logs.redirects.get(slot, 0) | self._tee
        self.carried: list[ScreenPipe] = []

    def variables(self) -> dict[str, str]:
        """Make the folder, and return the variable by which the worker finds its error.json."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700)
        return {_ERROR_FILE: str(self._folder / "error.json")}

    def open(self, stream: int) -> int | None:
        """Return the descriptor for standard output (1) or error (2), or None for the launcher's own."""
        if not self._redirects & stream:
            return None
        path = self._folder / ("stdout.log" if stream == 1 else "stderr.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        # A pipe between them: the disk of a log may become full.
        shown = (stream, f"[{self._member}] ") if self._tee & stream else None
        self.carried.append(ScreenPipe(log, shown=shown))
        return self.carried[-1].into


@dataclass(frozen=True, kw_only=True)
class WorkerWish:
    """Options that apply to every worker. Options that are not given are inherited from the environment."""

    bytes_per_worker: int | None = None
    offload_dirs: tuple[Path, ...] = ()
    """Directories for data that exceeds the memory limit."""
    stages: int | str | None = None
    """Number of members of a pipeline, or AUTO."""
    has_standing_shadows: bool = False
    """True if members of pipelines keep blocks of others where they have room."""
    ports: tuple[int, int] | None = None
    """First and last port at which members and agents may listen, or None for any."""
    shares_compile_cache: bool = False
    """True if nodes give the results of torch's compilers to one another. They are code."""
    host_bytes_per_worker: int | None = None
    """Limit of host memory, in a job on a device."""
    host_tier_bytes: int | None = None
    """Host memory above the directories, for data that leaves a device."""

    @property
    def least_members(self) -> int:
        """The fewest members with which the job can begin."""
        return self.stages if isinstance(self.stages, int) else 1

    def environment(self) -> dict[str, str]:
        """Return the options as environment variables for workers."""
        directories = os.pathsep.join(str(each) for each in self.offload_dirs)
        wished = {
            MEMORY_LIMIT: self.bytes_per_worker,
            HOST_MEMORY_LIMIT: self.host_bytes_per_worker,
            HOST_TIER: self.host_tier_bytes,
            OFFLOAD_DIRS: directories or None,
            STAGES: self.stages,
            STANDING_SHADOWS: 1 if self.has_standing_shadows else None,
            PORTS: f"{self.ports[0]}-{self.ports[1]}" if self.ports is not None else None,
        }
        return {name: str(value) for name, value in wished.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """Values that the environments of all workers of this agent share."""

    job: str
    settings: JobConfig
    agent: str
    run_dir: Path
    secret_file: Path
    host: str | None
    """Address at which members on other machines reach this node, or None if all nodes are on this machine."""
    master: Callable[[], tuple[str, int]]
    """Function that returns host and port for scripts that call init_process_group themselves."""
    mark: Mapping[str, str]
    """Variable by which the agent's guardian recognizes workers and their child processes."""
    wish: WorkerWish
    compile_cache: CompileCache
    checkpoints: CheckpointOptions | None = None


_DECIDE_BITS = {
    "OMP_NUM_THREADS": "1",  # as torchrun does
    # Gives sets of strings the same order in all workers, nodes and runs, and so a vocabulary made of one.
    "PYTHONHASHSEED": "0",
    # cuBLAS reads it when it starts, and gives the same bits at each call only with one of two values.
    CUBLAS_CONFIG: CUBLAS_CONFIG_DEFAULT,
}
"""Variables on which results depend bit for bit. A value that the user has set stays."""


def environment(common: WorkerEnvironment, worker: Start) -> dict[str, str]:
    """Return a worker's environment: torchrun's variables and those of elastrain.

    RANK is the rank in the first view that the worker is expected to belong to.
    """
    master_addr, master_port = common.master()
    env: dict[str, Any] = {
        "LOCAL_RANK": worker.slot,
        "RANK": worker.rank,
        "GROUP_RANK": worker.group_rank,
        "ROLE_RANK": worker.rank,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": common.settings.workers,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": worker.group_world_size,
        "ROLE_WORLD_SIZE": worker.world_size,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RUN_ID": common.job,
        "TORCHELASTIC_RESTART_COUNT": worker.restarts,
        "TORCHELASTIC_MAX_RESTARTS": common.settings.restarts_allowed,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        _TORCH_SIGNALS: inherited(_TORCH_SIGNALS, _TORCH_SIGNALS_DEFAULT),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **{name: inherited(name, value) for name, value in _DECIDE_BITS.items()},
        "ELASTRAIN_AGENT": common.agent,
        "ELASTRAIN_JOB": common.job,
        "ELASTRAIN_LIFE": common.settings.life.number,
        "ELASTRAIN_RESUME": as_text(worker.resume) if worker.resume is not None else "",
        "ELASTRAIN_MEMBER": worker.member,
        "ELASTRAIN_NODE": common.settings.node,
        "ELASTRAIN_SECRET_FILE": common.secret_file,
        "ELASTRAIN_RUN_DIR": common.run_dir,
        # Always set, because an armed run must not arm the runs that its scripts start.
        "ELASTRAIN_INJECT": int(common.settings.armed),
        "ELASTRAIN_WRONG": worker.wrong,
        "ELASTRAIN_HOST": common.host or "",
        "ELASTRAIN_DEVICES": worker.devices.as_text() if worker.devices is not None else "",
        **common.wish.environment(),
        **common.compile_cache.environment(),
        **(common.checkpoints.environment() if common.checkpoints is not None else {}),
        **common.mark,
    }
    return {name: str(value) for name, value in env.items()}


def agent_address(job: str, node: str | None) -> str:
    """Return the abstract UNIX address of the agent's channel, without the leading NUL.

    `node`: the node's name, or None in a job of one node.
    """
    return f"elastrain/{job}/agent" + (f"/{node}" if node else "")
