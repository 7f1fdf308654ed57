"""The store of a job under Slurm: an etcd on the first node, and the file in the job's folder that names it.

The batch script starts `python -m elastrain.launcher.schedulers.job_store` and ends it by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.shared import process_environment
from elastrain.launcher.shared.rundir import make_secret

_FILE = "job.json"
_ASK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class JobPlace:
    """The store's address and the numbers of nodes, by which a node finds its job."""

    endpoint: str
    nnodes: str
    spares: int


def place_in(folder: Path) -> JobPlace | None:
    """Return the place of the job in this folder, or None if there is none. Raises ConfigError."""
    try:
        told = json.loads((folder / _FILE).read_text())
        return JobPlace(endpoint=str(told["endpoint"]), nnodes=str(told["nnodes"]), spares=int(told["spares"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _FILE} does not say where the job's store is: {error}") from None


def main() -> None:
    """Serve until SIGTERM."""
    from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd

    parser = argparse.ArgumentParser()
    for option in ("--folder", "--nnodes", "--spares"):
        parser.add_argument(option, required=True)
    asked = parser.parse_args()
    folder = Path(asked.folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a requeued job keeps its secret
        make_secret(folder / "secret")
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with tempfile.TemporaryDirectory(prefix="elastrain-etcd-") as data:
        etcd = EmbeddedEtcd(Path(data) / "etcd", host=_own_address())
        try:
            place = {"endpoint": etcd.endpoint, "nnodes": asked.nnodes, "spares": int(asked.spares)}
            written = folder / f".{_FILE}"
            written.write_text(json.dumps(place))
            written.rename(folder / _FILE)
            signal.sigwait(signals)
        finally:
            etcd.close()


def _own_address() -> str:
    """Return this node's address as Slurm knows it, else that of the host's name. Raises ConfigError."""
    node = process_environment.inherited("SLURMD_NODENAME") or socket.gethostname()
    command = ["scontrol", "show", "node", node, "--oneliner"]
    words: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        words = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout.split()
    name = next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), socket.gethostname())
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(f"this node's address {name} cannot be resolved: {error}") from None


if __name__ == "__main__":
    main()
