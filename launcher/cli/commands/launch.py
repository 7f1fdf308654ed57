"""Command `elastrain launch kubernetes`: write what starts a job in a cluster. Nothing is started here."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.base import line_files
from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.node_options import node_range
from elastrain.launcher.schedulers.kubernetes import JobWish, PodSize, as_yaml, manifests
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.rundir import SECRET_BYTES
from elastrain.launcher.store.etcd_config import parse_endpoints


@dataclass(frozen=True, kw_only=True)
class PodFlags:
    """Options for the pods: one is a node of the job."""

    heading: ClassVar = "Pods"

    image: Annotated[str, typer.Option("--image", help="An image with elastrain and the script.")]
    nodes: Annotated[str, typer.Option("--nodes", help="Pods: N, or MIN:MAX; MAX are started.")] = "2"
    nproc_per_node: Annotated[str, typer.Option("--nproc-per-node", help="Workers: a number, cpu, gpu or auto.")] = "1"
    cpu: Annotated[str, typer.Option("--cpu", help="Processors of each pod.")] = PodSize.cpu
    memory: Annotated[str, typer.Option("--memory", help="Memory of each pod, with its shared memory.")] = (
        PodSize.memory
    )
    shm: Annotated[str, typer.Option("--shm", help="Shared memory of each pod.")] = PodSize.shm
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="NVIDIA GPUs of each pod.")] = 0
    retries: Annotated[int, typer.Option("--retries", min=0, help="Pods that each index may lose.")] = JobWish.retries


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """Options for the job's place in the cluster."""

    heading: ClassVar = "Job"

    name: Annotated[str, typer.Option("--name", help="The job's name, and that of all its objects.")]
    rdzv_endpoint: Annotated[
        str, typer.Option("--rdzv-endpoint", help="An etcd of your own: HOST:PORT[,…]; default: the pods run one.")
    ] = ""
    port_range: Annotated[str, typer.Option("--port-range", help="Ports between pods: A-B.")] = "30000-30999"
    grace: Annotated[int, typer.Option("--grace", min=1, max=3600, help="Seconds for a hand-over.")] = (
        JobWish.hand_over_s
    )
    claim: Annotated[str, typer.Option("--checkpoint-claim", help="A PersistentVolumeClaim for checkpoints.")] = ""
    job_set: Annotated[bool, typer.Option("--job-set", help="A JobSet, as Kubeflow's Trainer runs it.")] = False
    out: Annotated[Path | None, typer.Option("--out", help="A new file (mode 0600); default: the screen.")] = None


@grouped
def kubernetes(
    pods: PodFlags,
    cluster: ClusterFlags,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN-OPTIONS] SCRIPT ARGS...", help="After --: as for `run`.")
    ] = None,
) -> int:
    """Write the manifests of a job: Secret, headless Service, NetworkPolicy, and an indexed Job or a JobSet."""
    wish = _wish(pods, cluster, tuple(command or ()))
    text = as_yaml(manifests(wish, secrets.token_bytes(SECRET_BYTES), as_job_set=cluster.job_set))
    if cluster.out is None:
        print(text, end="")
        return 0
    try:
        with open(line_files.create(cluster.out), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--out {cluster.out} cannot be written: {error}") from None
    say(f"{cluster.out} is written, with the job's secret: kubectl apply -f {cluster.out}")
    return 0


def _wish(pods: PodFlags, cluster: ClusterFlags, command: tuple[str, ...]) -> JobWish:
    least, most = node_range(pods.nodes, "--nodes")
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", cluster.port_range)
    if found is None:
        raise ConfigError(f"--port-range {cluster.port_range!r}: write A-B, such as 30000-30999")
    if not re.fullmatch(r"[1-9]\d{0,3}|cpu|gpu|auto", pods.nproc_per_node):
        raise ConfigError(f"--nproc-per-node {pods.nproc_per_node!r}: write a number, or cpu, gpu or auto")
    return JobWish(
        name=cluster.name,
        image=pods.image,
        nodes_min=least,
        nodes_max=most,
        command=command,
        endpoint=",".join(parse_endpoints(cluster.rdzv_endpoint)) if cluster.rdzv_endpoint else "",
        workers=pods.nproc_per_node,
        ports=(int(found[1]), int(found[2])),
        size=PodSize(cpu=pods.cpu, memory=pods.memory, shm=pods.shm, gpus=pods.gpus),
        hand_over_s=cluster.grace,
        retries=pods.retries,
        claim=cluster.claim,
    )
