"""`elastrain run`: start a job, or this machine's part in one, and stay until it ends. torchrun's flags keep their
meaning. Options are parsed and checked here; `starting` does what they ask for.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from elastrain.errors import ConfigError
from elastrain.launcher import rundir, worker_start
from elastrain.launcher.commands.torchrun import BACKEND, local_world_size, refuse_backend, refuse_unknown
from elastrain.launcher.etcd_config import EtcdConfig, parse_endpoints
from elastrain.launcher.faults import read_faults
from elastrain.launcher.starting import KEY_TTL_S, NodeOrder, Order, address_towards, report, run_alone, run_node
from elastrain.launcher.worker_start import Script
from elastrain.offload.directories import try_directory
from elastrain.offload.errors import OffloadConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(
    script: Annotated[
        str, typer.Argument(help="The script to run, or a module with -m, or a program with --no-python.")
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS...")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="One node, this machine; the default.")] = False,
    nnodes: Annotated[
        str, typer.Option("--nnodes", help="Nodes, or MIN:MAX. Each node is started by a command of its own.")
    ] = "1",
    local_nodes: Annotated[
        int | None,
        typer.Option("--local-nodes", min=1, max=64, help="Simulate so many nodes here, with an etcd for them."),
    ] = None,
    nproc_per_node: Annotated[
        str,
        typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers here: a number, cpu, gpu or auto."),
    ] = "1",
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            min=0,
            help="Workers started again; one no longer counts an hour after it has come in.",
        ),
    ] = 10,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", "--rdzv_id", help="The job's name; default: made from the time.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="The etcd of several nodes: HOST:PORT[,…].")
    ] = None,
    rdzv_backend: Annotated[
        str, typer.Option("--rdzv-backend", "--rdzv_backend", help="How nodes find each other: etcd-v3 only.")
    ] = BACKEND,
    node_name: Annotated[
        str | None, typer.Option("--node-name", help="This node's name in the job; default: the host's name.")
    ] = None,
    local_addr: Annotated[
        str | None,
        typer.Option("--local-addr", "--local_addr", help="This node's address for the others; default: towards etcd."),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="The job's secret, mode 0600, the same on all nodes; made on first use."),
    ] = None,
    etcd_ca: Annotated[Path | None, typer.Option("--etcd-ca", help="TLS to etcd: the authority's certificate.")] = None,
    etcd_cert: Annotated[Path | None, typer.Option("--etcd-cert", help="This node's certificate for etcd.")] = None,
    etcd_key: Annotated[Path | None, typer.Option("--etcd-key", help="Its key.")] = None,
    etcd_user: Annotated[str | None, typer.Option("--etcd-user", help="etcd's user.")] = None,
    etcd_password_file: Annotated[
        Path | None, typer.Option("--etcd-password-file", help="A file (mode 0600) with that user's password.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="The run's folder; default: ~/.local/state/elastrain/runs/JOB."),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            "--log_dir",
            help="Workers' logs, in a new folder JOB_…; default: logs in the run's folder.",
        ),
    ] = None,
    redirects: Annotated[
        str, typer.Option("--redirects", "-r", help="Output into files: 0 none, 1 out, 2 err, 3 both; or 0:3,1:2.")
    ] = "0",
    tee: Annotated[
        str, typer.Option("--tee", "-t", help="Output into files and, with [member], to the screen; as --redirects.")
    ] = "0",
    module: Annotated[bool, typer.Option("-m", "--module", help="The script is a module, as with python -m.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", "--no_python", help="The script is a program of its own.")
    ] = False,
    local_ranks_filter: Annotated[
        str | None,
        typer.Option("--local-ranks-filter", "--local_ranks_filter", help="On the screen only these local ranks: 0,1."),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="What each worker may hold in memory, as 4G or 512M; default: no limit."),
    ] = None,
    offload_dir: Annotated[
        list[Path] | None,
        typer.Option(  # whether it is fit is said in a sentence of ours
            "--offload-dir",
            readable=False,
            help="Directory on an SSD for what does not fit into --memory-limit; repeatable.",
        ),
    ] = None,
    join_timeout: Annotated[
        float,
        typer.Option(
            "--join-timeout", min=0.1, help="Seconds for MIN nodes to come, and from the first worker to the last."
        ),
    ] = 120.0,
    last_call: Annotated[
        float, typer.Option("--last-call", min=0.0, help="Seconds that more nodes are waited for once MIN are there.")
    ] = 5.0,
    park_timeout: Annotated[
        float,
        typer.Option(
            "--park-timeout", min=0.1, help="Seconds to wait for a store, or for nodes, without which nothing goes on."
        ),
    ] = 3600.0,
    key_ttl: Annotated[
        float | None,
        typer.Option(
            "--key-ttl",
            min=1.0,
            help="Seconds after which etcd forgets a job whose agents were all killed; more than --park-timeout. "
            "Default: 12 hours, or twice --park-timeout.",
        ),
    ] = None,
    stop_grace: Annotated[
        float,
        typer.Option(
            "--stop-grace",
            "--shutdown-timeout",
            "--shutdown_timeout",
            min=0.0,
            help="Seconds from SIGTERM to SIGKILL when the job is stopped.",
        ),
    ] = 5.0,
    inject: Annotated[bool, typer.Option("--inject", help="Arm fault injection: allow `elastrain inject`.")] = False,
    faults: Annotated[
        Path | None, typer.Option("--faults", help="Faults to inject, a line each as after `elastrain inject`; arms.")
    ] = None,
) -> int:
    """Run SCRIPT in as many workers as asked for; start again what dies; end when the work is done.

    RUN OPTIONS come before the script; all that follows it belongs to the script. In the workers OMP_NUM_THREADS is 1
    and PYTHONHASHSEED is 0 unless they are set.
    """
    refuse_unknown(script)
    refuse_backend(rdzv_backend)
    target = _checked_script(script, module=module, no_python=no_python)
    _limit_memory(memory_limit, offload_dir or [])
    job = rdzv_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if not _NAME.fullmatch(job):
        raise ConfigError(f"--rdzv-id {job!r}: use up to 64 letters, digits, '.', '_' and '-'")
    nodes_min, nodes_max = _range(nnodes) if local_nodes is None else (local_nodes, local_nodes)
    _check_together(standalone, nnodes, local_nodes, rdzv_endpoint, rdzv_id, nodes_max)
    local_workers = local_world_size(nproc_per_node)
    slots = range(local_workers)
    tees, redirected = _masks(tee, "--tee", slots), _masks(redirects, "--redirects", slots)
    shown = _ranks(local_ranks_filter, slots)
    if key_ttl is not None and key_ttl <= park_timeout:
        raise ConfigError(
            f"--key-ttl {key_ttl:g}: it must be more than --park-timeout ({park_timeout:g}), lest the job's keys go "
            "while a node still waits for them"
        )
    order = Order(
        job=job,
        script=Script.of(target, args or [], module=module, python=not no_python),
        target=script,
        workers=local_workers,
        nodes_min=nodes_min,
        nodes_max=nodes_max,
        max_restarts=max_restarts,
        run_dir=run_dir,
        log_dir=log_dir,
        # Who is not shown writes into files instead.
        redirects={slot: mask if slot in shown else 3 for slot, mask in redirected.items()},
        tee={slot: mask if slot in shown else 0 for slot, mask in tees.items()},
        join_timeout_s=join_timeout,
        last_call_s=last_call,
        stop_grace_s=stop_grace,
        park_timeout_s=park_timeout,
        key_ttl_s=key_ttl if key_ttl is not None else max(KEY_TTL_S, 2 * park_timeout),
        armed=inject or faults is not None,
        faults=read_faults(faults) if faults is not None else (),
    )
    if local_nodes is not None:
        from elastrain.launcher.simulated import run_local_nodes

        return run_local_nodes(order)
    worker_start.import_torch_early()
    if nodes_max == 1:
        return report(run_alone(order))
    assert rdzv_endpoint is not None
    etcd = EtcdConfig(
        endpoints=parse_endpoints(rdzv_endpoint),
        ca=etcd_ca,
        cert=etcd_cert,
        key=etcd_key,
        user=etcd_user,
        password=_password(etcd_password_file),
    )
    node = NodeOrder(
        name=_node_name(node_name),
        etcd=etcd,
        secret_file=(secret_file or rundir.home() / "secret").absolute(),
        host=local_addr or address_towards(etcd.endpoints[0]),
    )
    return report(run_node(order, node))


def _check_together(
    standalone: bool, nnodes: str, local_nodes: int | None, endpoint: str | None, job: str | None, nodes_max: int
) -> None:
    if local_nodes is not None and (standalone or nnodes != "1" or endpoint is not None):
        raise ConfigError("--local-nodes excludes --standalone, --nnodes and --rdzv-endpoint: the nodes are all here")
    if standalone and (nodes_max > 1 or endpoint is not None):
        raise ConfigError("--standalone means one node, this machine: leave --nnodes and --rdzv-endpoint out")
    if local_nodes is None and nodes_max > 1 and (endpoint is None or job is None):
        raise ConfigError(
            "several nodes find each other by --rdzv-endpoint HOST:PORT (an etcd) and --rdzv-id: give both on each "
            "node, or simulate nodes here with --local-nodes"
        )


def _range(text: str) -> tuple[int, int]:
    """torchrun's form of --nnodes: N, or MIN:MAX. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    if not found:
        raise ConfigError(f"--nnodes {text!r}: write N, or MIN:MAX")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {text}: MIN must be 1 or more, and at most MAX")
    return least, most


def _ranks(text: str | None, slots: range) -> set[int]:
    if text is None:
        return set(slots)
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--local-ranks-filter {text!r}: write local ranks, such as 0,1")
    shown = {int(part) for part in text.split(",")}
    if shown.isdisjoint(slots):
        raise ConfigError(
            f"--local-ranks-filter {text}: none of them is a local rank of this node's {len(slots)} (from 0): "
            "nothing would be shown"
        )
    return shown


def _node_name(given: str | None) -> str:
    name = given or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "node"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--node-name {name!r}: use up to 64 letters, digits, '.', '_' and '-'")
    return name


def _password(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read the password file {file}: chmod 600 {file}")
        return file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {file} can not be read: {error}") from None


def _limit_memory(limit: str | None, directories: list[Path]) -> None:
    """Workers inherit it, whichever node's agent starts them. Raises ConfigError."""
    if limit is not None:
        os.environ["ELASTRAIN_MEMORY_LIMIT"] = str(_size_bytes(limit))
    source = "--offload-dir" if directories else "ELASTRAIN_OFFLOAD_DIRS"
    inherited = os.environ.get("ELASTRAIN_OFFLOAD_DIRS", "").split(os.pathsep)
    named = directories or [Path(each) for each in inherited if each]
    if named and not os.environ.get("ELASTRAIN_MEMORY_LIMIT"):
        raise ConfigError(f"{source} {named[0]} is for what a memory limit leaves no room for: give --memory-limit too")
    for each in named:
        try:
            try_directory(each)
        except OffloadConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    if directories:
        os.environ["ELASTRAIN_OFFLOAD_DIRS"] = os.pathsep.join(str(each.absolute()) for each in directories)


def _size_bytes(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([KMGT]?)(?:i?B)?", text)
    if found is None:
        raise ConfigError(f"--memory-limit {text!r}: write a whole number of bytes, or of K, M, G or T, such as 4G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]]


def _checked_script(script: str, *, module: bool, no_python: bool) -> str:
    if module and no_python:
        raise ConfigError("-m and --no-python exclude one another")
    if module:
        return script
    if no_python:
        program = shutil.which(script)
        if program is None:
            raise ConfigError(f"there is no program {script!r} that can be executed")
        return program
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}: check the path (options of `run` come before the script)")
    return script


def _masks(text: str, option: str, slots: range) -> dict[int, int]:
    """torchrun's form: `3` for every local rank, or `0:3,1:2`. Raises ConfigError."""
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(slots, int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(f"{option} {text!r}: write 0, 1, 2 or 3, or one of these per local rank, such as 0:3,1:2")
    named = {int(rank): int(mask) for rank, mask in (part.split(":") for part in text.split(","))}
    return {slot: named.get(slot, 0) for slot in slots}
