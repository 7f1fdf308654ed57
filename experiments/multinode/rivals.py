"""The loss of the first host of three for torchrun (c10d rendezvous) and for TorchFT (Lighthouse).

Both train the same model by DDP on Gloo, a worker on each host, over TCP alone. The first host runs what the others
meet at: torchrun's store, or the Lighthouse. A job lives if its survivors commit steps after the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from elastrain.launcher.namespaces.switch import lacking
from experiments import torchft
from experiments.goodput.systems import Peer, logs
from experiments.recovery.peers.run import LIGHTHOUSE, SHORTEST, python_process
from experiments.recovery.peers.worker import command
from tests.support.quorum_harness import QuorumHosts, quorum_hosts

HOSTS = ("h0", "h1", "h2")
PORT = 29500
STARTS_S = 180.0
SETTLES_S = 15.0
"""Commits within so many seconds of the loss do not count: they may have been under way."""
LIVES_S = 60.0
"""Survivors that commit nothing for so long after that are given up."""
COMMITS = 3


def worker(folder: Path) -> list[str]:
    """Arguments of every worker."""
    return [
        *command(folder, kills=0, members=len(HOSTS), micro_batch_size=1),
        "--micro-batches",
        "6",
        "--pace-s",
        "0.1",
    ]


def torchrun(hosts: QuorumHosts, folder: Path, host: str) -> list[str]:
    """Arguments of Python for the host's torchrun."""
    launch = ["--nnodes=2:3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=rivals", "--max-restarts=100"]
    address = hosts.switch.address(host)
    launch += [f"--rdzv-endpoint={hosts.switch.address(HOSTS[0])}:{PORT}", f"--local-addr={address}"]
    module = ["-m", "experiments.recovery.peers.torchrun_worker", *worker(folder)]
    return ["-m", "torch.distributed.run", *launch, *module, "--checkpoint", str(folder / "state.pt")]


def replica(hosts: QuorumHosts, folder: Path, host: str) -> list[str]:
    """Arguments of Python for the host's replica under TorchFT."""
    module = ["-m", "experiments.recovery.peers.torchft_worker", *worker(folder)]
    module += ["--rank", str(HOSTS.index(host)), "--host", hosts.switch.address(host)]
    return [*module, "--lighthouse", f"http://{hosts.switch.address(HOSTS[0])}:{PORT}", *SHORTEST.replica]


@contextmanager
def training(hosts: QuorumHosts, folder: Path, system: str) -> Iterator[Peer]:
    """The job on all hosts, until the block ends."""
    folder.mkdir()
    arguments = torchrun if system == "torchrun" else replica
    with ExitStack() as stack:

        def start(host: str, words: Sequence[str], name: str) -> None:
            # Both systems look up the host's name: here it is the address, in a UTS namespace of each process.
            named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hosts.switch.address(host))
            inside = (*hosts.switch.inside(host), *named)
            stack.enter_context(python_process(words, folder / f"log-{name}", inside=inside, interface="eth0"))

        if system == "torchft":
            start(HOSTS[0], [str(LIGHTHOUSE), "--bind", f"0.0.0.0:{PORT}", *SHORTEST.lighthouse], "lighthouse")
        for host in HOSTS:
            start(host, arguments(hosts, folder, host), host)
        yield Peer(folder)


def commits(job: Peer, after_s: float) -> int:
    """Number of commits after a time, as all processes tell them."""
    _, found = job.look()
    return sum(commit.at_s > after_s for commit in found)


def waited(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Return True if it is reached in time."""
    until_s = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.2)
    return True


def lives(folder: Path, system: str) -> dict[str, Any]:
    """Return True if the job lives, and the last words of its processes if it does not."""
    with quorum_hosts(folder, *HOSTS) as hosts, training(hosts, folder / "job", system) as job:
        if not waited(lambda: commits(job, 0.0) >= COMMITS * len(HOSTS), STARTS_S):
            return {f"{system}_lives": None, f"{system}_reason": f"it has not begun: {logs(folder / 'job')[-1500:]}"}
        hosts.lose(HOSTS[0])
        killed_s = time.monotonic()
        lived = waited(lambda: commits(job, killed_s + SETTLES_S) >= COMMITS, SETTLES_S + LIVES_S)
        running = sum(bool(hosts.pids(host)) for host in HOSTS[1:])
        said = "" if lived else last_words(folder / "job")
    return {f"{system}_lives": lived, f"{system}_hosts_running": running, f"{system}_said": said}


def last_words(folder: Path) -> str:
    """The last line of each survivor's output that names an error."""
    found = []
    for host in HOSTS[1:]:
        lines = (folder / f"log-{host}").read_text(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "rror" in line]
        found.append(f"{host}: {(errors or lines or ['nothing'])[-1][-300:]}")
    return "; ".join(found)


def measured(folder: Path) -> dict[str, Any]:
    """The figures of both systems. None, with the reason, where one cannot run."""
    if (reason := lacking()) is not None:
        return {"torchrun_lives": None, "torchft_lives": None, "rivals_reason": reason}
    found = lives(_made(folder / "torchrun"), "torchrun")
    if (reason := torchft.provide()) is not None:
        return found | {"torchft_lives": None, "torchft_reason": reason}
    return found | lives(_made(folder / "torchft"), "torchft")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
