"""Manifests of a job for Kubernetes, as plain values, and as YAML. No I/O.

The first pods run the job's own etcd, and are named by the headless Service. Its three ports are the first ones of the
range that the NetworkPolicy opens. The pod's kernel chooses every other port on which an agent or a member listens, and
a sysctl of the pod keeps all of them in that range. A pod's own name is the name of its node: a pod that comes back
counts as a new node.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elastrain.errors import ConfigError
from elastrain.launcher.core.quorum.founding import MEMBERS_MAX
from elastrain.launcher.quorum.join_hosts import PORTS

Manifest = dict[str, Any]
_SECRET_MODE = 0o600
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]i?|)")
_SECRET_DIR = "/etc/elastrain"
_CHECKPOINTS = "/checkpoints"
_PORTS_MIN = 128
_REPLICATED = "node"
_WAIT_S = 1800
"""Seconds that a pod waits for the others, whose images may have to be pulled."""
_PROBE_S = 5
"""Seconds between two looks of the startup probe."""
_LAST_CHECKPOINT_S = 30
_MARGIN_S = 15
_SET_HERE = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-id",
    "--rdzv-endpoint",
    "--join",
    "--port-range",
    "--secret-file",
    "--node-name",
    "--local-addr",
    "--shutdown-timeout",
    "--checkpoint-dir",
)
"""Options of `run` that the manifests set."""


@dataclass(frozen=True, kw_only=True)
class PodSize:
    """Resources of one pod, in the words of Kubernetes ("8", "64Gi"). `shm`: its shared memory, which memory covers."""

    cpu: str = "4"
    memory: str = "16Gi"
    shm: str = "8Gi"
    gpus: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for a quantity that Kubernetes does not read."""
        for option, value in (("--cpu", self.cpu), ("--memory", self.memory), ("--shm", self.shm)):
            if not _QUANTITY.fullmatch(value):
                raise ConfigError(f"{option} {value!r}: write a quantity of Kubernetes, such as 8, 500m or 16Gi")


@dataclass(frozen=True, kw_only=True)
class JobWish:
    """Options of the job. Raises ConfigError for values that Kubernetes or `elastrain run` would refuse."""

    name: str
    image: str
    nodes_min: int
    nodes_max: int
    command: tuple[str, ...]
    """Options of `run`, the script and its arguments."""
    endpoint: str = ""
    """An etcd of the user's own, or "": the pods run the job's etcd."""
    workers: str = "1"
    ports: tuple[int, int] = (30000, 30999)
    size: PodSize = PodSize()
    hand_over_s: int = 30
    retries: int = 3
    """Number of pods that one index may lose."""
    claim: str = ""
    """PersistentVolumeClaim for checkpoints, or ""."""

    def __post_init__(self) -> None:
        """Check the values that are used as names, and the size of the range of ports."""
        for option, value in (("--name", self.name), ("--checkpoint-claim", self.claim or "c")):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"{option} {value!r}: use up to 40 small letters, digits and '-', a letter first")
        if not self.image or any(c.isspace() for c in self.image):
            raise ConfigError(f"--image {self.image!r}: name the image that has elastrain and the script")
        first, last = self.ports
        if not (1024 <= first <= last <= 65535 and last - first + 1 >= _PORTS_MIN):
            raise ConfigError(f"--port-range {first}-{last}: write A-B, at least {_PORTS_MIN} ports from 1024 to 65535")
        if not self.command:
            raise ConfigError("no script is named: write it, and its arguments, after --")
        before = next((i for i, word in enumerate(self.command) if word.endswith(".py")), len(self.command))
        for word in self.command[:before]:
            if word.partition("=")[0].replace("_", "-") in _SET_HERE:
                raise ConfigError(f"{word} is set by the manifest: leave it out behind --")

    @property
    def labels(self) -> dict[str, str]:
        """Labels of all objects of the job."""
        return {"app.kubernetes.io/name": "elastrain", "app.kubernetes.io/instance": self.name}


def manifests(wish: JobWish, secret: bytes, *, as_job_set: bool = False) -> list[Manifest]:
    """Return the Secret, the headless Service, the NetworkPolicy, and the indexed Job or a JobSet around it."""
    return [
        _object("v1", "Secret", wish, type="Opaque", data={"secret": base64.b64encode(secret).decode()}),
        _object("v1", "Service", wish, spec=_service(wish)),
        _object("networking.k8s.io/v1", "NetworkPolicy", wish, spec=_policy(wish)),
        _job_set(wish) if as_job_set else _object("batch/v1", "Job", wish, spec=_job(wish, wish.name)),
    ]


def _object(version: str, kind: str, wish: JobWish, **more: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": wish.name, "labels": wish.labels}, **more}


def _service(wish: JobWish) -> Manifest:
    first = {"name": "first", "protocol": "TCP", "port": wish.ports[0]}
    return {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": wish.labels, "ports": [first]}


def _policy(wish: JobWish) -> Manifest:
    pods = {"matchLabels": wish.labels}
    ports = [{"protocol": "TCP", "port": wish.ports[0], "endPort": wish.ports[1]}]
    ingress = [{"from": [{"podSelector": pods}], "ports": ports}]
    return {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress}


def _job(wish: JobWish, stem: str) -> Manifest:
    """Return the Job. `stem` is what the host names of its pods begin with, before their index."""
    return {
        "completionMode": "Indexed",
        "completions": wish.nodes_max,
        "parallelism": wish.nodes_max,
        "podReplacementPolicy": "Failed",
        "backoffLimitPerIndex": wish.retries,
        "template": {"metadata": {"labels": wish.labels}, "spec": _pod(wish, stem)},
    }


def _job_set(wish: JobWish) -> Manifest:
    job = _job(wish, f"{wish.name}-{_REPLICATED}-0")
    replicated = {"name": _REPLICATED, "replicas": 1, "template": {"metadata": {"labels": wish.labels}, "spec": job}}
    network = {"enableDNSHostnames": True, "subdomain": wish.name}
    return _object(
        "jobset.x-k8s.io/v1alpha2", "JobSet", wish, spec={"network": network, "replicatedJobs": [replicated]}
    )


def _pod(wish: JobWish, stem: str) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "secret", "secret": {"secretName": wish.name, "defaultMode": _SECRET_MODE}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wish.size.shm}},
    ]
    if wish.claim:
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": wish.claim}})
    first = wish.ports[0] if wish.endpoint else wish.ports[0] + PORTS
    sysctl = {"name": "net.ipv4.ip_local_port_range", "value": f"{first} {wish.ports[1]}"}
    return {
        "restartPolicy": "Never",
        "subdomain": wish.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": max(wish.hand_over_s, _LAST_CHECKPOINT_S) + _MARGIN_S,
        "securityContext": {"sysctls": [sysctl]},
        "containers": [_container(wish, stem)],
        "volumes": volumes,
    }


def _container(wish: JobWish, stem: str) -> Manifest:
    size = wish.size
    resources = {"cpu": size.cpu, "memory": size.memory} | ({"nvidia.com/gpu": size.gpus} if size.gpus else {})
    mounts: list[Manifest] = [
        {"name": "secret", "mountPath": _SECRET_DIR, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    mounts += [{"name": "checkpoints", "mountPath": _CHECKPOINTS}] if wish.claim else []
    # It ends with 0 once the agent has made the run's folder.
    probe = {"exec": {"command": ["elastrain", "status", "--json"]}, "timeoutSeconds": 10, "periodSeconds": _PROBE_S}
    return {
        "name": "node",
        "image": wish.image,
        "command": ["elastrain", "run", *_options(wish, stem), *wish.command],
        "env": [_told("POD_NAME", "metadata.name"), _told("POD_IP", "status.podIP")],
        "resources": {"requests": resources, "limits": resources},
        "startupProbe": {**probe, "failureThreshold": 60 + (0 if wish.endpoint else _WAIT_S // _PROBE_S)},
        "volumeMounts": mounts,
    }


def _told(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _options(wish: JobWish, stem: str) -> list[str]:
    told = {
        "--nnodes": f"{wish.nodes_min}:{max(wish.nodes_max, 2)}",
        "--nproc-per-node": wish.workers,
        "--rdzv-id": wish.name,
        **({"--rdzv-endpoint": wish.endpoint} if wish.endpoint else _own_etcd(wish, stem)),
        "--secret-file": f"{_SECRET_DIR}/secret",
        "--node-name": "$(POD_NAME)",
        "--local-addr": "$(POD_IP)",
        "--shutdown-timeout": str(wish.hand_over_s),
    }
    told |= {"--checkpoint-dir": _CHECKPOINTS} if wish.claim else {}
    return [word for pair in told.items() for word in pair]


def _own_etcd(wish: JobWish, stem: str) -> dict[str, str]:
    """Return the options with which the first pods run the job's etcd. Their names outlive the pods."""
    names = [f"{stem}-{index}.{wish.name}:{wish.ports[0]}" for index in range(min(wish.nodes_max, MEMBERS_MAX))]
    return {"--join": ",".join(names), "--join-timeout": str(_WAIT_S)}


def as_yaml(documents: Sequence[Manifest]) -> str:
    """Return the documents as YAML, with strings quoted as in JSON."""
    return "".join("---\n" + "".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> Iterator[str]:
    pairs = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    for key, item in pairs:
        lead = "- " if key is None else f"{key}:"
        if not isinstance(item, dict | list) or not item:
            yield f"{lead}{'' if key is None else ' '}{_scalar(item)}"
        elif key is None:
            first, *others = _lines(item)
            yield lead + first
            yield from (f"  {line}" for line in others)
        else:
            yield lead
            yield from (f"  {line}" for line in _lines(item))


def _scalar(item: Any) -> str:
    """Return a scalar, or an empty collection. JSON's escapes of two halves of a character are none of YAML."""
    if not isinstance(item, str):
        return json.dumps(item)
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in item) + '"'
