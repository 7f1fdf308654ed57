"""Runs the peers and measures: `of_torchrun`, `of_torchft`. Called by `experiments.recovery.run`.

Each job kills its own victim three times, as `worker` says, and is ended from here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments import torchft
from experiments.harness import ROOT, Reach, record
from experiments.plots import bars
from experiments.recovery.peers.standstill import Cost, Life, Lives, costs, kills, recovered_s, survivors, undisturbed_s
from experiments.recovery.peers.worker import VICTIM, command

RESULTS = Path(__file__).with_name("results")
PEERS = {
    "torchft": "TorchFT,\nshortest timeouts",
    "torchft_defaults": "TorchFT,\nas documented",
    "torchrun": "torchrun,\nstate in memory",
}
REACHES = {f"times_{key}": Reach(limit=20, at_least=True) for key in PEERS}
LIGHTHOUSE = Path(__file__).with_name("lighthouse.py")
_LOOK_S = 0.05
_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Alike for all peers."""

    members: int = 4
    kills: int = 3
    micro_batch_size: int = 8

    def options(self, folder: Path) -> list[str]:
        return command(folder, kills=self.kills, members=self.members, micro_batch_size=self.micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class TorchFT:
    """Command lines of the lighthouse and of the replicas; what is not named has TorchFT's default."""

    lighthouse: tuple[str, ...]
    replica: tuple[str, ...] = ()


DEFAULTS = TorchFT(
    lighthouse=("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
)
"""The lighthouse's command line in TorchFT's README (its heartbeat timeout is 5 s, the Manager's timeouts 60 s)."""
SHORTEST = TorchFT(
    lighthouse=(
        *("--min_replicas", "2", "--quorum_tick_ms", "10", "--join_timeout_ms", "1000"),
        *("--heartbeat_timeout_ms", "1000"),
    ),
    replica=("--timeout-s", "5"),
)
"""A replica that is not next to the dead one in Gloo's ring sees nothing until its neighbour has left for a new quorum,
which waits `join_timeout_ms` for it: shorter than the members' skew, every step would be a quorum without somebody.
"""


def compared(ours: Mapping[str, Any], setting: Setting, *, quick: bool, keep: bool) -> dict[str, Any]:
    """Run the peers; `ours` has its own standstills, measured just before. `keep`: the result and the plot."""
    values = figures(setting)
    for key in PEERS:
        peer_s = values[f"standstill_{key}_s"]
        values[f"times_{key}"] = None if peer_s is None else peer_s / ours["standstill_s"]
        usual_s = values.get(f"standstill_undisturbed_{key}_s")
        values[f"excess_{key}_s"] = None if peer_s is None or usual_s is None else peer_s - usual_s
    own = {key: ours[key] for key in ("kills", "standstill_s", "standstills_s", "digest_equal")}
    own |= {"standstill_undisturbed_s": ours["standstill_undisturbed_s"]}
    own |= {"excess_s": ours["standstill_s"] - ours["standstill_undisturbed_s"]}
    if not keep:
        return values
    record("recovery", own | values, quick=quick, settings=asdict(setting), folder=RESULTS)
    drawn = {"elastrain": ours["standstills_s"]}
    drawn |= {name: found for key, name in PEERS.items() if (found := values.get(f"standstills_{key}_s"))}
    bars(RESULTS / "standstill.png", drawn, label="seconds", title="Nobody computes after a SIGKILL", logarithmic=True)
    return values


def figures(setting: Setting) -> dict[str, Any]:
    """The medians over the kills, the single ones beside them; null with the reason where a peer cannot run."""
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-peers-", dir="/dev/shm") as name:
        values |= _figure("torchrun", of_torchrun(Path(name) / "torchrun", setting), of_its_rank=True)
        reason = torchft.provide()
        for key, settings in (("torchft", SHORTEST), ("torchft_defaults", DEFAULTS)):
            if reason is None:
                values |= _figure(key, of_torchft(Path(name) / key, setting, settings), of_its_rank=False)
            else:
                values |= {f"standstill_{key}_s": None, f"kept_after_{key}_s": None, "torchft_reason": reason}
    return values


def _figure(key: str, lives: Mapping[str, Life], *, of_its_rank: bool) -> dict[str, Any]:
    found: Sequence[Cost] = costs(lives, of_its_rank=of_its_rank)
    standstills, kept = [one.standstill_s for one in found], [one.kept_after_s for one in found]
    return {
        f"standstill_{key}_s": statistics.median(standstills),
        f"kept_after_{key}_s": statistics.median(kept),
        f"standstills_{key}_s": standstills,
        f"standstill_undisturbed_{key}_s": undisturbed_s(lives),
    }


def of_torchrun(folder: Path, setting: Setting) -> Mapping[str, Life]:
    """DDP on Gloo under torchrun with c10d rendezvous; `folder` is in memory. What its processes did."""
    folder.mkdir()
    launch = ["--nnodes=1", f"--nproc-per-node={setting.members}", "--rdzv-backend=c10d"]
    launch += ["--rdzv-endpoint=127.0.0.1:0", f"--max-restarts={setting.kills + 3}"]
    worker = ["-m", "experiments.recovery.peers.torchrun_worker", *setting.options(folder)]
    arguments = ["-m", "torch.distributed.run", *launch, *worker, "--checkpoint", str(folder / "state.pt")]
    with python_process(arguments, folder / "log"):
        lives = _watched(folder, setting, of_its_rank=True, meanwhile=lambda: None)
    return lives.look()


def of_torchft(folder: Path, setting: Setting, timeouts: TorchFT) -> Mapping[str, Life]:
    """A replica per member; a new one in the victim's place as soon as the others have gone on. What they did."""
    folder.mkdir()
    port = free_port()
    with contextlib.ExitStack() as jobs:
        lighthouse = [str(LIGHTHOUSE), "--bind", f"[::]:{port}", *timeouts.lighthouse]
        jobs.enter_context(python_process(lighthouse, folder / "lighthouse.log"))

        def start(rank: int) -> subprocess.Popen[bytes]:
            module = ["-m", "experiments.recovery.peers.torchft_worker", *setting.options(folder)]
            more = ["--rank", str(rank), "--lighthouse", f"http://127.0.0.1:{port}", *timeouts.replica]
            return jobs.enter_context(python_process([*module, *more], folder / f"log-{rank}-{time.monotonic_ns()}"))

        replicas = {rank: start(rank) for rank in range(setting.members)}

        def bring_back() -> None:
            if replicas[VICTIM].poll() is not None:
                replicas[VICTIM] = start(VICTIM)

        lives = _watched(folder, setting, of_its_rank=False, meanwhile=bring_back)
    return lives.look()


def _watched(folder: Path, setting: Setting, *, of_its_rank: bool, meanwhile: Callable[[], None]) -> Lives:
    """Until the others have gone on after the last kill; `meanwhile` is called after each at which they have.

    Raises RuntimeError with the end of the logs if that takes longer than _LIMIT_S.
    """
    lives, until_s = Lives(folder), time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        found = lives.look()
        done = [recovered_s(survivors(found, at, of_its_rank=of_its_rank), at) is not None for at in kills(found)]
        if done and all(done):
            if len(done) == setting.kills:
                return lives
            meanwhile()
        time.sleep(_LOOK_S)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*log*")))
    raise RuntimeError(f"expected {setting.kills} kills and two steps after each within {_LIMIT_S:g} s; logs:\n{logs}")


@contextlib.contextmanager
def python_process(
    arguments: Sequence[str], log: Path, *, inside: Sequence[str] = (), interface: str = "lo"
) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process and all that it starts; its output in `log`. Ended when the block is left.

    `inside`: words to write before the command, to run it on another host. `interface`: that of Gloo.
    """
    python_path = os.pathsep.join([str(torchft.FOLDER), str(ROOT)])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHFT_")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    environment["GLOO_SOCKET_IFNAME"] = interface
    # Else workers that torchrun restarts (torch 2.13) find the addresses of the dead in the store that they share with
    # the rendezvous, and half of the restarts fail or hang.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*inside, sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its workers, which have sessions of their own
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
