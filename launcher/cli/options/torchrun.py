"""torchrun's options (torch 2.13): advice for those that `elastrain run` lacks, and the words that two of them take.

Other code does not belong here.
"""

from __future__ import annotations

import os
import subprocess
import sys

from elastrain.errors import ConfigError

BACKEND = "etcd-v3"
WORKERS_MAX = 1024
ADVICE = {
    "monitor-interval": "leave it out: ends of workers are noticed at once, nothing is polled",
    "start-method": "leave it out: scripts are started as programs, as by torchrun",
    "rdzv-conf": "say --join-timeout, --last-call, --etcd-ca, --etcd-cert, --etcd-key or --etcd-user instead",
    "node-rank": "leave it out: nodes are ranked by their names (--node-name)",
    "master-addr": "leave it out: the first node's address is used (--local-addr); nodes meet at --rdzv-endpoint",
    "master-port": "leave it out: a free port is used; nodes meet at --rdzv-endpoint",
    "event-log-handler": "leave it out: events are in events.jsonl in the run's folder (--run-dir)",
    "role": "leave it out: all workers are alike, ROLE_NAME is default",
    "logs-specs": "leave it out: see --log-dir, --redirects and --tee",
    "duplicate-stdout-filters": "write the output into files with --tee 1, and filter those",
    "duplicate-stderr-filters": "write the output into files with --tee 2, and filter those",
    "numa-binding": "leave it out, and start the whole command under numactl",
    "signals-to-handle": "leave it out: SIGTERM, SIGINT, SIGHUP and SIGQUIT stop the node's workers",
    "run-path": "leave it out: each worker is a Python process of its own",
    "virtual-local-rank": "leave it out: LOCAL_RANK is the worker's own, and it sees every device",
}


def refuse_unknown(script: str) -> None:
    """Raise ConfigError if the script's name looks like an unknown option.

    script: the first word of the command line that is no known option or its value.
    """
    if not script.startswith("-"):
        return
    name = script.partition("=")[0]
    advice = ADVICE.get(name.removeprefix("--").replace("_", "-"))
    if advice is None:
        raise ConfigError(f"No such option: {name}. Options of `run` come before the script: see elastrain run --help")
    raise ConfigError(f"torchrun's {name} is no option here: {advice}")


def refuse_backend(backend: str) -> None:
    """Raise ConfigError for any backend except etcd-v3."""
    if backend != BACKEND:
        raise ConfigError(
            f"--rdzv-backend {backend}: nodes meet in an etcd v3 only. Leave it out, and name that etcd in "
            "--rdzv-endpoint"
        )


def local_world_size(words: str) -> int:
    """Return the number of workers that --nproc-per-node asks for.

    The text is a number, or one worker per core (cpu), per GPU or other accelerator of torch (gpu), or per GPU if there
    are any, else per core (auto). Raises ConfigError.
    """
    if words.isdecimal():
        number = int(words)
    elif words in ("cpu", "gpu", "auto"):
        number = _devices(words)
    else:
        raise ConfigError(f"--nproc-per-node {words!r}: write a number, or cpu, gpu or auto")
    if not 1 <= number <= WORKERS_MAX:
        raise ConfigError(f"--nproc-per-node {words}: from 1 to {WORKERS_MAX} workers; {number} came")
    return number


def _devices(kind: str) -> int:
    gpus = _accelerators() if kind != "cpu" else 0
    if kind == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu: there is no GPU here; write a number, or cpu")
    return gpus if kind == "gpu" or (kind == "auto" and gpus) else len(os.sched_getaffinity(0))


def _accelerators() -> int:
    """Return the number of accelerators that a process sees. A child counts, because this process goes on to fork.

    A driver that has started does not survive a fork.
    """
    program = "from elastrain.device import device_count; print(device_count())"
    counted = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if counted.returncode:
        words = counted.stderr.strip().rpartition("\n")[2] or f"exit code {counted.returncode}"
        raise ConfigError(f"the GPUs cannot be counted ({words}): write a number in --nproc-per-node, or cpu")
    return int(counted.stdout)
