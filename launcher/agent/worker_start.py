"""Start and end of worker processes through torchelastic, one context per worker, and their environment.

torch is imported late, and in the agent only here. `core` decides when to start or end which worker.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.processes import tied
from elastrain.base.resume import as_text
from elastrain.base.told_devices import CUBLAS_CONFIG, CUBLAS_CONFIG_DEFAULT
from elastrain.launcher.agent import worker_limits
from elastrain.launcher.agent.node_cache import CompileCache
from elastrain.launcher.shared.job_values import JobConfig, Start
from elastrain.launcher.shared.process_environment import inherited, set_for_a_moment
from elastrain.launcher.shared.screen import ScreenPipe

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest, PContext

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


def import_torch_early() -> None:
    """Begin the import (a second or more) while the agent sets up the rest. `start` waits for it."""
    threading.Thread(target=import_torch, name="elastrain-import-torch", daemon=True).start()


def import_torch() -> None:
    """Import torch.

    Other threads hardly run during the import, so none of them may have a heartbeat or lease to keep alive.
    """
    import torch.distributed.elastic.multiprocessing  # noqa: F401


class WorkerProcess:
    """One started worker. `pidfd` is readable once it has ended."""

    is_standby = False

    def __init__(self, context: PContext, logs: Sequence[ScreenPipe] = ()) -> None:
        self._context, self._logs = context, logs
        self.pid: int = context.pids()[0]
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
        handler = self._context.subprocess_handlers[0]  # type: ignore[attr-defined]
        exit_code = int(handler.proc.wait())
        os.close(self.pidfd)
        return exit_code

    def close(self) -> None:
        """Write the last lines of its logs, and close them. Takes up to a tenth of a second per log."""
        for log in self._logs:
            log.close()
        self._context.close()


def start(worker: Start, script: Script, common: WorkerEnvironment, logs: Logs) -> WorkerProcess:
    """Start one worker in a session of its own, which ends with this thread. Raises OSError if it cannot."""
    from torch.distributed.elastic.multiprocessing import start_processes

    program, *args = tied([script.command, *script.args])
    files = _MemberLogs(logs, worker.member, worker.slot)
    handler_before = signal.getsignal(signal.SIGURG)
    # Without this, torchelastic would replace the agent's signal handlers. The worker gets the usual value.
    with set_for_a_moment(_TORCH_SIGNALS, "SIGURG") as before:
        try:
            context = start_processes(
                name=worker.member,
                entrypoint=program,
                args={0: tuple(args)},
                envs={0: {_TORCH_SIGNALS: before or _TORCH_SIGNALS_DEFAULT, **environment(common, worker)}},
                logs_specs=files,  # type: ignore[arg-type]  # the methods that are called
                log_line_prefixes={0: f"[{worker.member}] "},
            )
        finally:
            signal.signal(signal.SIGURG, handler_before)
            for log in files.carried:
                os.close(log.into)
    process = WorkerProcess(context, files.carried)
    if worker.warm_up:
        worker_limits.lower(process.pid)
    return process


def error_file(logs: Logs, worker: Start) -> str:
    """Return the path of a worker's error.json, in a new folder of its own."""
    variables: dict[int, dict[str, str]] = {0: {}}
    _MemberLogs(logs, worker.member, worker.slot).reify(variables)
    return variables[0]["TORCHELASTIC_ERROR_FILE"]


class _MemberLogs:
    """torchelastic's LogsSpecs with one folder per member: error.json, and stdout.log and stderr.log if requested."""

    def __init__(self, logs: Logs, member: str, slot: int) -> None:
        self._folder = logs.folder / member
        self._tee = logs.tee.get(slot, 0)
        self._redirects = logs.redirects.get(slot, 0) | self._tee
        self.carried: list[ScreenPipe] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        from torch.distributed.elastic.multiprocessing import LogsDest

        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700)  # its files are torchelastic's, of the usual modes
        stdout, stderr = str(self._folder / "stdout.log"), str(self._folder / "stderr.log")
        error_file = str(self._folder / "error.json")
        envs[0]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(
            stdouts={0: self._carried_to(stdout) if self._redirects & 1 else ""},
            stderrs={0: self._carried_to(stderr) if self._redirects & 2 else ""},
            tee_stdouts={0: stdout} if self._tee & 1 else {},
            tee_stderrs={0: stderr} if self._tee & 2 else {},
            error_files={0: error_file},
        )

    def _carried_to(self, path: str) -> str:
        """Return the path that torchelastic opens instead of the log file, whose disk may become full."""
        self.carried.append(ScreenPipe(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)))
        return f"/proc/self/fd/{self.carried[-1].into}"


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
