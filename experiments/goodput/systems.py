"""Jobs that are trained under the same kills, each seen alike: who trains at which place, and what is committed.

Nothing but SIGKILL comes from outside. What a system does with a loss is its own affair; TorchFT, which starts nothing
itself, gets a new replica in the place of one that has ended, at once.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastrain.job.batch import DataOrder
from experiments import torchft
from experiments.baselines.workload import Workload
from experiments.goodput.figures import Commit
from experiments.jobs import Script, elastic
from experiments.journals import Follower, Run, Tail
from experiments.recovery.figures import wrong_samples
from experiments.recovery.peers.run import LIGHTHOUSE, SHORTEST, free_port, python_process
from experiments.recovery.peers.worker import command
from experiments.train_gpt.data import Windows

TRAIN = Path(__file__).with_name("train.py")
FOR_EVER = 1_000_000
"""Steps and restarts: jobs are ended from here."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Alike for all systems."""

    members: int = 4
    micro_batches: int = 48
    micro_batch_size: int = 1
    pace_s: float = 0.1
    """What each micro-batch waits beside its computing, so that two cores carry four members."""
    checkpoint_every_s: float = 10.0
    """Under torchrun."""

    @property
    def order(self) -> DataOrder:
        dataset = Windows("train", context=Workload().context)
        return DataOrder(
            dataset_size=len(dataset),
            global_batch_size=self.micro_batches * self.micro_batch_size,
            micro_batch_size=self.micro_batch_size,
        )

    def of_peers(self, folder: Path) -> list[str]:
        options = command(folder, kills=0, members=self.members, micro_batch_size=self.micro_batch_size)
        return [*options, "--micro-batches", str(self.micro_batches), "--pace-s", str(self.pace_s)]


@dataclass(frozen=True, kw_only=True)
class Process:
    """One life at a place."""

    place: int
    pid: int
    started_s: float
    trains_s: float | None
    """When it began to compute; None before."""

    @property
    def trains(self) -> bool:
        return self.trains_s is not None


class System(Protocol):
    """A job that goes on until it is ended from outside."""

    def look(self) -> tuple[list[Process], list[Commit]]:
        """All processes so far in the order of their start, and all commits as each process tells them."""

    def amiss(self) -> Mapping[str, object]:
        """Figures that only this system has, at the end."""


Start = Callable[[Path, Setting], AbstractContextManager[System]]


# ----------------------------------------------------------------------------------------------------------- elastrain


class Elastrain:
    """Four workers on one node under `elastrain run`."""

    def __init__(self, folder: Path, setting: Setting, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._setting, self._process = folder, setting, process
        self._follower = Follower(folder)

    def look(self) -> tuple[list[Process], list[Commit]]:
        if self._process.poll() is not None:
            raise RuntimeError(f"the job ended: {(self._folder / 'output.log').read_text()[-2000:]}")
        run = self._follower.look()
        found = [
            Process(place=_place(run, name), pid=pid, started_s=run.started_s[name], trains_s=_trains_s(run, name))
            for name, pid in run.pids.items()
        ]
        commits = [
            Commit(step=passed.step, at_s=passed.at_s) for member in run.members.values() for passed in member.passed
        ]
        return sorted(found, key=lambda each: each.started_s), commits

    def amiss(self) -> Mapping[str, object]:
        members = self._follower.look().members.values()
        return {"samples_wrong_steps": len(wrong_samples(members, self._setting.order))}


def _place(run: Run, member: str) -> int:
    """That of the first one in the row of those who took each other's place."""
    while member in run.replaces:
        member = run.replaces[member]
    return int(member.removeprefix("m"))


def _trains_s(run: Run, member: str) -> float | None:
    return next((work.started_s for work in run.members[member].micro_batches), None)


@contextmanager
def elastrain(folder: Path, setting: Setting) -> Iterator[System]:
    options = {
        "micro-batches": setting.micro_batches,
        "micro-batch-size": setting.micro_batch_size,
        "pace-s": setting.pace_s,
        "steps": FOR_EVER,
    }
    script = Script(
        path=TRAIN, args=tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
    )
    launch = ("--standalone", "--max-restarts", str(FOR_EVER))
    with elastic(folder, script, members=setting.members, options=launch) as process:
        yield Elastrain(folder, setting, process)


# --------------------------------------------------------------------------------------------------------------- peers


class Peer:
    """Reads the journals of the peers' processes; `mend` is called at each look."""

    def __init__(self, folder: Path, mend: Callable[[], None] = lambda: None) -> None:
        self._folder, self._mend = folder, mend
        self._tails: dict[Path, Tail] = {}
        self._started_s: dict[Path, float] = {}
        self._trains_s: dict[Path, float] = {}
        self._commits: list[Commit] = []

    def look(self) -> tuple[list[Process], list[Commit]]:
        self._mend()
        for path in self._folder.glob("*.jsonl"):
            if path not in self._tails:
                self._tails[path], self._started_s[path] = Tail(path), started_s(_pid(path))
            for line in self._tails[path].read():
                self._trains_s.setdefault(path, line["t"])
                if line["event"] == "step":
                    self._commits.append(Commit(step=line["step"], at_s=line["t"], share=line["share"]))
        found = [
            Process(
                place=int(path.stem.split("-")[0]), pid=_pid(path), started_s=at_s, trains_s=self._trains_s.get(path)
            )
            for path, at_s in self._started_s.items()
        ]
        return sorted(found, key=lambda each: each.started_s), list(self._commits)

    def amiss(self) -> Mapping[str, object]:
        return {}


def _pid(journal: Path) -> int:
    return int(journal.stem.split("-")[1])


def started_s(pid: int) -> float:
    """When the process was started, on the monotonic clock; now if it has gone already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return time.monotonic()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot_s + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def torchrun(folder: Path, setting: Setting) -> Iterator[System]:
    """DDP on Gloo; everybody restarts after a loss, from the newest checkpoint."""
    folder.mkdir(parents=True)
    launch = ["--nnodes=1", f"--nproc-per-node={setting.members}", "--rdzv-backend=c10d"]
    launch += ["--rdzv-endpoint=127.0.0.1:0", f"--max-restarts={FOR_EVER}"]
    worker = ["-m", "experiments.recovery.peers.torchrun_worker", *setting.of_peers(folder)]
    worker += ["--checkpoint", str(folder / "state.pt"), "--checkpoint-every-s", str(setting.checkpoint_every_s)]
    with python_process(["-m", "torch.distributed.run", *launch, *worker], folder / "log"):
        yield Peer(folder)


@contextmanager
def torchft_replicas(folder: Path, setting: Setting) -> Iterator[System]:
    """A replica of one process per member, with the shortest timeouts that worked here; new ones at once."""
    reason = torchft.provide()
    if reason is not None:
        raise RuntimeError(reason)
    folder.mkdir(parents=True)
    port = free_port()
    with ExitStack() as jobs:
        lighthouse = [str(LIGHTHOUSE), "--bind", f"[::]:{port}", *SHORTEST.lighthouse]
        jobs.enter_context(python_process(lighthouse, folder / "lighthouse.log"))

        def start(rank: int) -> subprocess.Popen[bytes]:
            module = ["-m", "experiments.recovery.peers.torchft_worker", *setting.of_peers(folder)]
            more = ["--rank", str(rank), "--lighthouse", f"http://127.0.0.1:{port}", *SHORTEST.replica]
            return jobs.enter_context(python_process([*module, *more], folder / f"log-{rank}-{time.monotonic_ns()}"))

        replicas = {rank: start(rank) for rank in range(setting.members)}

        def mend() -> None:
            for rank, process in replicas.items():
                if process.poll() is not None:
                    replicas[rank] = start(rank)

        yield Peer(folder, mend)


SYSTEMS: Mapping[str, Start] = {"elastrain": elastrain, "torchrun": torchrun, "torchft": torchft_replicas}


def logs(folder: Path, names: Sequence[str] = ("*log*",)) -> str:
    """The ends of what a job's processes said, for whoever has to find out why it does not go on."""
    paths = sorted({path for name in names for path in folder.glob(name)})
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in paths)
