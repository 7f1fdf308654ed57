"""The folder in which torch's compilers keep their results on a node, and what two nodes must share to exchange them.

Results of a compiler are code: inductor's and Triton's kernels, and libraries that it has built for the processor.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from elastrain.base.resume import NodeDisk

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Variables by which torch and Triton are told their folders."""
PEERS = "ELASTRAIN_COMPILE_PEERS"
"""Variable with the nodes from which a worker may take a cache."""
_LIBRARIES = ("torch", "triton", "pytorch-triton")


@dataclass(frozen=True, kw_only=True)
class CacheSources:
    """The cache folder of this node, and the nodes that give theirs."""

    folder: Path
    peers: tuple[NodeDisk, ...]


def peers_as_text(peers: Sequence[NodeDisk]) -> str:
    """Return the nodes as text for an environment variable; see `peers_from_text`."""
    return msgspec.json.encode(list(peers)).decode()


def peers_from_text(text: str) -> tuple[NodeDisk, ...]:
    """Parse the text of `peers_as_text`. Raises ValueError."""
    return _PEERS.decode(text)


_PEERS: msgspec.json.Decoder[tuple[NodeDisk, ...]] = msgspec.json.Decoder(tuple[NodeDisk, ...])


def stamp() -> str:
    """Return what two machines must have in common to run each other's compiled code.

    Inductor's keys name its sources and the device, but not the processor for which it builds libraries.
    """
    versions = {}
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    told = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join([_processor(), f"Python {platform.python_version()}", *told])


def _processor() -> str:
    """Return the processor's model and a fingerprint of its instruction sets, or its architecture."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = dict(line.partition(":")[::2] for line in reversed(lines) if line.startswith(("model name", "flags")))
        words = {name.strip(): value.strip() for name, value in found.items()}
        if "model name" in words:
            features = blake2b(words.get("flags", "").encode(), digest_size=4).hexdigest()
            return f"{words['model name']} (features {features})"
    return platform.machine()
