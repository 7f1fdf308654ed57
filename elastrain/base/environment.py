"""A worker's environment, read here and nowhere else: for the runtime, and for rooms that stand alone.

How `elastrain doctor` asks a script what a job of it will hold in memory: carried in the environment.

The name under which one life of a job goes among processes and in the store: another for each life.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from elastrain.base import checkpoint_settings
from elastrain.base.checkpoint_settings import CheckpointOptions, parse_every
from elastrain.base.processes import started
from elastrain.base.resume import Resume, from_text

NAME = "ELASTRAIN_STATE_MEMORY"


@dataclass(frozen=True, kw_only=True)
class EstimateWish:
    """`prepare` writes what each member will hold into `file`, as JSON, and ends the process."""

    file: str
    nodes: int
    members_per_node: int
    backups: int | None = None
    """None: as many as the script says."""

    @property
    def members(self) -> dict[str, str]:
        """Member -> node, in rank order."""
        count, each = self.nodes * self.members_per_node, self.members_per_node
        return {f"m{rank}": f"node{rank // each}" for rank in range(count)}

    def environment(self) -> dict[str, str]:
        return {NAME: json.dumps(asdict(self))}

    def answer(self, text: str) -> None:
        """Raises OSError."""
        Path(self.file).write_text(text)


_MARK = "~"
"""In no job's name."""


def scope(job: str, life: int) -> str:
    """The job's own name in its first life. Whoever still is in an older life is refused by every handshake."""
    return job if life == 1 else f"{job}{_MARK}{life}"


def life_of(name: str) -> int:
    """The number of the life that goes under this name."""
    return int(name.partition(_MARK)[2] or 1)


def job_of(name: str) -> str:
    """The job's name, of any of its lives."""
    return name.partition(_MARK)[0]


_PROCESS = "ELASTRAIN_PROCESS"
"""The process that has entered the job as the worker: its pid, and when it was started."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Who this process is. Without a launcher it is a job of one."""

    job: str
    member: str
    node: str
    agent: str | None
    """Abstract UNIX address of the agent's channel; None without a launcher."""
    secret: bytes | None
    run_dir: Path | None
    host: str | None
    """The address of this node that members on other machines dial; None where all are on this one."""
    memory_limit_bytes: int | None
    """What this process may hold in memory, and the directories on SSDs for what does not fit."""
    offload_dirs: tuple[str, ...]
    armed: bool = False
    """Faults on request are taken."""
    wrong: str = ""
    """One of them: what of this process must not fit the job."""
    life: int = 1
    """Which of the job's lives this process belongs to."""

    @property
    def scope(self) -> str:
        """The name under which this life's processes know one another."""
        return scope(self.job, self.life)


def claim() -> None:
    """Note that this process is the worker that the variables are meant for: the processes that it starts are not."""
    os.environ[_PROCESS] = _this_process()


def parent_worker() -> str | None:
    """Return the worker that started this process or an ancestor of it, in words; None if there is none."""
    if not _is_inherited():
        return None
    pid = os.environ[_PROCESS].partition(" ")[0]
    return f"{os.environ.get('ELASTRAIN_MEMBER')} of job {os.environ.get('ELASTRAIN_JOB')} (process {pid})"


def _is_inherited() -> bool:
    return os.environ.get(_PROCESS, "") not in ("", _this_process())


def _this_process() -> str:
    return f"{os.getpid()} {started()}"


def _told(name: str) -> str | None:
    """Return what the launcher says under this name, to the worker itself. It says nothing to the worker's children."""
    return None if _is_inherited() else os.environ.get(name)


def run_folder() -> Path | None:
    """The run's folder for what members write; None without a launcher."""
    named = _told("ELASTRAIN_RUN_DIR")
    return Path(named) if named else None


def member() -> str:
    """This member's id."""
    return _told("ELASTRAIN_MEMBER") or "m0"


def secret() -> bytes | None:
    """The job's secret; None without a launcher. Raises OSError if its file cannot be read."""
    named = _told("ELASTRAIN_SECRET_FILE")
    found = Path(named).read_bytes() if named else None
    return found[::-1] if found and _wrong() == "secret" else found


def expected_place() -> tuple[int, int]:
    """Return the rank and the world size that the launcher expects of this worker; (0, 1) without a launcher.

    Raises ValueError if one of them is no number.
    """
    if _told("ELASTRAIN_AGENT") is None:
        return 0, 1
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _node() -> str:
    return _told("ELASTRAIN_NODE") or "node0"


def _wrong() -> str:
    return _told("ELASTRAIN_WRONG") or ""


def resume() -> Resume | None:
    """The checkpoint that this life of the job starts from; None: it starts anew. Raises ValueError if it is none."""
    told = _told("ELASTRAIN_RESUME")
    return from_text(told) if told else None


def checkpoint_options() -> CheckpointOptions | None:
    """Where this job writes durable checkpoints; None: nowhere. Raises ValueError where no launcher has written it."""
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
    """Whether the job starts from what lies in this very place, and not from a copy elsewhere."""
    resumed = resume()
    if resumed is None:
        return False
    if resumed.disks:
        return _is_same(source or place, place) and any(disk.node == _node() for disk in resumed.disks)
    return _is_same(resumed.place, place)


def _resumed_job(place: str, source: str | None) -> str:
    """Whose checkpoint the job starts from, where all nodes look for it on the disks that they write to."""
    resumed = resume()
    return resumed.job if resumed is not None and resumed.disks and _is_same(source or place, place) else ""


def _is_same(one: str, other: str) -> bool:
    return one == other or ("://" not in one + other and os.path.realpath(one) == os.path.realpath(other))


def statement_wish() -> EstimateWish | None:
    """What `elastrain doctor` asks of this script; None in every job."""
    told = _told(NAME)
    return EstimateWish(**json.loads(told)) if told else None


def stages() -> int | None:
    """How many members a pipeline is to have, if the launcher was told. Raises ValueError if it is no number."""
    told = _told("ELASTRAIN_STAGES")
    return int(told) if told else None


def master_address() -> str:
    """Where scripts that call init_process_group themselves meet: torch's own variable."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def read_environment() -> Environment:
    """Raises OSError if the secret's file cannot be read, ValueError if a number is none."""
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
