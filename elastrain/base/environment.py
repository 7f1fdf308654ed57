"""A worker's environment variables, which only this module reads, and the names of a job's lives.

Each life of a job (one start of all its workers) has its own name among processes and in the store.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastrain.base import checkpoint_settings, compile_cache
from elastrain.base.checkpoint_settings import CheckpointOptions, parse_every
from elastrain.base.compile_cache import CacheSources
from elastrain.base.doctor_wishes import BITS, MEMORY, BitsWish, EstimateWish
from elastrain.base.processes import started
from elastrain.base.resume import Resume, from_text
from elastrain.base.told_devices import CUBLAS_CONFIG, ToldDevices

_MARK = "~"
"""Separator between job name and life. No job name contains it."""


def scope(job: str, life: int) -> str:
    """Return the name of a life. The first one has the job's own name. Handshakes refuse processes of other lives."""
    return job if life == 1 else f"{job}{_MARK}{life}"


def life_of(name: str) -> int:
    """Return the number of the life with this name."""
    return int(name.partition(_MARK)[2] or 1)


def job_of(name: str) -> str:
    """Return the job's name, given the name of any of its lives."""
    return name.partition(_MARK)[0]


_OF_INDUCTOR = "TORCHINDUCTOR_"
_PLACES = (compile_cache.INDUCTOR, "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_WORKER_START")
"""Variables of inductor that decide where and how fast it compiles, and nothing else."""
_PROCESS = "ELASTRAIN_PROCESS"
"""Variable with the process that has entered the job as the worker: its pid and its start time."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Identity and settings of this process. Without a launcher it is a job of one member."""

    job: str
    member: str
    node: str
    agent: str | None
    """Abstract UNIX address of the agent's channel; None without a launcher."""
    secret: bytes | None
    run_dir: Path | None
    host: str | None
    """Address of this node that members on other machines dial. None if all members are on this machine."""
    memory_limit_bytes: int | None
    """Memory that this process may use: the device's in a job on a device.

    `offload_dirs` are directories on SSDs for what does not fit.
    """
    offload_dirs: tuple[str, ...]
    armed: bool = False
    """True if fault injection is enabled."""
    wrong: str = ""
    """An injected fault: the property of this process that shall not fit the job (for example `secret`)."""
    life: int = 1
    """Number of the job's life that this process belongs to."""

    @property
    def scope(self) -> str:
        """The name of this life, by which its processes recognize one another."""
        return scope(self.job, self.life)


def adopt(variables: Mapping[str, str]) -> None:
    """Become the worker that these variables describe. Another launcher has started this process."""
    os.environ.update(variables)


def threads_are_told() -> bool:
    """Return True if the user or the launcher has set the number of threads that torch computes with."""
    return "OMP_NUM_THREADS" in os.environ


def claim() -> None:
    """Mark this process as the worker that the variables are meant for. Processes that it starts ignore them."""
    os.environ[_PROCESS] = _this_process()


def parent_worker() -> str | None:
    """Return a description of the worker that started this process or an ancestor of it, or None if there is none."""
    if not _is_inherited():
        return None
    pid = os.environ[_PROCESS].partition(" ")[0]
    return f"{os.environ.get('ELASTRAIN_MEMBER')} of job {os.environ.get('ELASTRAIN_JOB')} (process {pid})"


def _is_inherited() -> bool:
    return os.environ.get(_PROCESS, "") not in ("", _this_process())


def _this_process() -> str:
    return f"{os.getpid()} {started()}"


def _told(name: str) -> str | None:
    """Return the variable's value if this process is the worker. Processes that a worker starts get None."""
    return None if _is_inherited() else os.environ.get(name)


def run_folder() -> Path | None:
    """Return the run's folder for files of members; None without a launcher."""
    named = _told("ELASTRAIN_RUN_DIR")
    return Path(named) if named else None


def member() -> str:
    """Return this member's id."""
    return _told("ELASTRAIN_MEMBER") or "m0"


def secret() -> bytes | None:
    """Return the job's secret; None without a launcher. Raises OSError if its file cannot be read."""
    named = _told("ELASTRAIN_SECRET_FILE")
    found = Path(named).read_bytes() if named else None
    return found[::-1] if found and _wrong() == "secret" else found


def expected_place() -> tuple[int, int]:
    """Return the rank and the world size that the launcher expects of this worker; (0, 1) without a launcher.

    Raises ValueError if one of them is not a number.
    """
    if _told("ELASTRAIN_AGENT") is None and _told(BITS) is None:
        return 0, 1
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _node() -> str:
    return _told("ELASTRAIN_NODE") or "node0"


def _wrong() -> str:
    return _told("ELASTRAIN_WRONG") or ""


def resume() -> Resume | None:
    """Return the checkpoint that this life of the job starts from, or None.

    Raises ValueError if the text is invalid.
    """
    told = _told("ELASTRAIN_RESUME")
    return from_text(told) if told else None


def checkpoint_options() -> CheckpointOptions | None:
    """Return the settings for durable checkpoints; None if the job writes none.

    Raises ValueError for invalid settings.
    """
    place = _told(checkpoint_settings.DIR)
    if not place:
        return None
    every, source = _told(checkpoint_settings.EVERY), _told(checkpoint_settings.SOURCE) or None
    steps, seconds = parse_every(every) if every else (0, 0.0)
    return CheckpointOptions(
        place=place,
        every_steps=steps,
        every_s=seconds,
        keep=int(_told(checkpoint_settings.KEEP) or 3),
        keep_for_s=float(age) if (age := _told(checkpoint_settings.KEEP_FOR)) else None,
        layout=_told(checkpoint_settings.LAYOUT) or checkpoint_settings.SHARED,
        source=source,
        resumes=_goes_on_from(place, source),
        resumed_job=_resumed_job(place, source),
    )


def _goes_on_from(place: str, source: str | None) -> bool:
    """Return True if the job resumes from a checkpoint in this very place, not from a copy elsewhere."""
    resumed = resume()
    if resumed is None:
        return False
    if resumed.disks:
        return _is_same(source or place, place) and any(disk.node == _node() for disk in resumed.disks)
    return _is_same(resumed.place, place)


def _resumed_job(place: str, source: str | None) -> str:
    """Return the resumed job if its checkpoint lies on the nodes' disks, in the place that is written to, else ""."""
    resumed = resume()
    return resumed.job if resumed is not None and resumed.disks and _is_same(source or place, place) else ""


def _is_same(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))


def doctor_wish() -> EstimateWish | BitsWish | None:
    """Return the request of `elastrain doctor`; None in every job."""
    memory, bits = _told(MEMORY), _told(BITS)
    return EstimateWish(**json.loads(memory)) if memory else BitsWish(**json.loads(bits)) if bits else None


AUTO = "auto"
"""The value of `--stages` that asks for as few members per pipeline as have room in memory."""


def stages() -> int | str | None:
    """Return the number of members per pipeline that the launcher was given, AUTO, or None.

    Raises ValueError for other text.
    """
    told = _told("ELASTRAIN_STAGES")
    return told if told == AUTO else int(told) if told else None


def standing_shadows() -> bool:
    """Return True if the launcher was asked for standing shadows."""
    return _told("ELASTRAIN_STANDING_SHADOWS") == "1"


def host_memory() -> tuple[int | None, int]:
    """Return the limit of host memory in a job on a device, or None, and the bytes of the tier in host memory.

    Raises ValueError for other text.
    """
    limit, tier = _told("ELASTRAIN_HOST_MEMORY_LIMIT"), _told("ELASTRAIN_HOST_TIER")
    return int(limit) if limit else None, int(tier) if tier else 0


def port_range() -> tuple[int, int] | None:
    """Return the first and the last port at which this worker may listen, or None for any.

    Raises ValueError for other text.
    """
    told = _told("ELASTRAIN_PORT_RANGE")
    if not told:
        return None
    first, last = told.split("-")
    return int(first), int(last)


def told_devices() -> tuple[ToldDevices, int | None]:
    """Return what the agent knows of this process's accelerators, and the worker's number on its node, from 0.

    The number is None without a launcher. Raises ValueError for other text.
    """
    slot = None if _told("ELASTRAIN_AGENT") is None else int(os.environ.get("LOCAL_RANK", "0"))
    return ToldDevices.from_text(_told("ELASTRAIN_DEVICES") or ""), slot


def cublas_config() -> str | None:
    """Return the setting by which cuBLAS computes deterministically, or None."""
    return os.environ.get(CUBLAS_CONFIG)


def set_cublas_config(value: str) -> None:
    """Set that setting for this process, before CUDA starts in it."""
    os.environ[CUBLAS_CONFIG] = value


def cache_sources() -> CacheSources | None:
    """Return this node's compile cache and the nodes that give theirs; None if none does.

    Raises ValueError for other text.
    """
    told, folder = _told(compile_cache.PEERS), os.environ.get(compile_cache.INDUCTOR)
    peers = compile_cache.peers_from_text(told) if told else ()
    return CacheSources(folder=Path(folder), peers=peers) if peers and folder else None


def compiler_variables() -> dict[str, str]:
    """Return the variables by which inductor is told how to compile."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_INDUCTOR) and name not in _PLACES}


def set_compiler_default(name: str, value: str) -> None:
    """Set a variable of inductor, before it is imported, unless the user has set it."""
    os.environ.setdefault(name, value)


def master_address() -> str:
    """Return torch's MASTER_ADDR, where scripts that call init_process_group themselves meet."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def told_to_libraries(names: Iterable[str]) -> dict[str, str]:
    """Return the values of environment variables that libraries read, each under `variable` and its name."""
    return {f"variable {name}": os.environ.get(name, "(unset)") for name in names}


def read_environment() -> Environment:
    """Read this process's environment.

    Raises OSError if the secret's file cannot be read, and ValueError if a number is invalid.
    """
    limit = _told("ELASTRAIN_MEMORY_LIMIT")
    return Environment(
        job=_told("ELASTRAIN_JOB") or f"alone-{uuid.uuid4().hex[:12]}",
        life=int(_told("ELASTRAIN_LIFE") or 1),
        member=member(),
        node=_node(),
        agent=_told("ELASTRAIN_AGENT"),
        secret=secret(),
        run_dir=run_folder(),
        host=_told("ELASTRAIN_HOST") or None,
        memory_limit_bytes=int(limit) if limit else None,
        offload_dirs=tuple(filter(None, (_told("ELASTRAIN_OFFLOAD_DIRS") or "").split(os.pathsep))),
        armed=_told("ELASTRAIN_INJECT") == "1",
        wrong=_wrong(),
    )


def tell_one_machine() -> None:
    """Tell libraries in the process of a stream, which share data out by these variables, that it is alone."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK="0")
