"""Settings about the nodes of a job: the least and the most that compute, spares, and the quarantine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.decisions.blame import Failure


@dataclass(frozen=True, kw_only=True)
class Least:
    """Minimum size of a job at its beginning. Later it continues with fewer nodes and members."""

    nodes: int = 1
    members: int = 1
    """Minimum number of workers on all these nodes together: the members of one pipeline."""


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """Past failures of a node that count in the job's next life, too."""

    device_failures: tuple[Failure, ...] = ()
    losses_s: tuple[float, ...] = ()
    """Monotonic times at which the node lost workers."""


@dataclass(frozen=True, kw_only=True)
class QuarantineRule:
    """The rule by which a node gets no more workers: `losses` of its workers within `within_s` seconds."""

    losses: int
    within_s: float


@dataclass(frozen=True, kw_only=True)
class NodePlaces:
    """The nodes that a job has at most, and the rule of their quarantine."""

    nodes: int = 1
    """Number of nodes that compute, at most."""
    spares: int = 0
    """Number of nodes beyond these that wait, and take the places of lost ones."""
    quarantine: QuarantineRule | None = None
    are_fixed: bool = False
    """True if another launcher has started all nodes with their workers, so that no option could be another one."""
