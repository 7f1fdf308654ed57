"""From which checkpoint a life of the job starts, and what has to be as it was then. Plain values; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAY_CHANGE = frozenset(
    # Where the state lies and how often members look at one another; what runs the script. None of it decides a bit.
    {"audit", "backups", "cross_check_every", "elastrain", "Python", "NumPy", "stages"}
)
"""Settings of the spec in which a resumed job may differ from the one that wrote the checkpoint."""

_HASHES = ("layers' switches and numbers", "model")


@dataclass(frozen=True, kw_only=True)
class NodeDisk:
    """A node whose own disk has parts of a checkpoint, and where its agent lets others read them."""

    node: str
    door: str
    """The agent's name in the handshake."""
    endpoint: str
    """HOST:PORT; empty where there is no other node."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint, chosen once: the same for all members of a life, also for those that come later."""

    place: str
    """The directory or address that it lies in."""
    name: str
    """Its folder there."""
    step: int
    """The committed step after which it stands; -1: parameters alone, of a model that was trained elsewhere."""
    job: str = ""
    """That has written it; empty where nobody has said so."""
    scale: float | None = None
    """The loss scale of the next step, and how many steps it has been clean; None: as the rule begins."""
    clean_steps: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    """What all members of the job that wrote it had in common; empty where nobody has said so."""
    changes: tuple[str, ...] = ()
    """What was changed on purpose before it was written, a sentence each."""
    accepts_changes: bool = False
    """A changed spec is taken on purpose."""
    lives_before: int = 0
    """Added to the numbers of this job's lives where its checkpoints are named: they are newer than all that lie there,
    also than those that it has left behind."""
    disks: tuple[NodeDisk, ...] = ()
    """Where its parts lie on the disks of several nodes; `place` names these for people then."""

    def __str__(self) -> str:
        return f"{self.name} in {self.place}"


def as_text(resume: Resume) -> str:
    """For an environment variable; see `from_text`."""
    return msgspec.json.encode(resume).decode()


def from_text(text: str) -> Resume:
    """Inverse of `as_text`. Raises ValueError."""
    return _DECODER.decode(text)


_DECODER = msgspec.json.Decoder(Resume)


def is_taken_over(name: str) -> bool:
    """Whether a member that comes later gets this setting from the others, whatever its own script has set.

    What a script sets may follow from the number of members, which is another one by then.
    """
    return name == "schedulers" or " of parameter group " in name or " of scheduler " in name


def changed(resume: Resume, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of what a job with this spec does otherwise than the one that wrote the checkpoint, in order."""
    differing = (n for n, its in resume.spec.items() if n not in MAY_CHANGE and spec.get(n, "(unset)") != its)
    # Another optimizer or script has other settings, too, and a hash tells nobody what: what says most is named first.
    return tuple(sorted(differing, key=lambda n: (n != "optimizer", n in _HASHES, " of scheduler " in n, n)))


def changes(resume: Resume, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The same as clauses, with both values."""
    return tuple(
        f"its {name} is {spec.get(name, '(unset)')}, the checkpoint's is {resume.spec[name]}"
        for name in changed(resume, spec)
    )


def changes_so_far(resume: Resume | None, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """What was changed on purpose until now, a sentence each: for the checkpoints that a job with this spec writes."""
    if resume is None:
        return ()
    now = f" (accepted when the job went on after step {resume.step})"
    return (*resume.changes, *(change + now for change in changes(resume, spec)))


def refusal(resume: Resume, spec: Mapping[str, Any]) -> str:
    """Why a job with this spec may not go on from the checkpoint, in one clause; empty if it may."""
    found = () if resume.accepts_changes else changes(resume, spec)
    if not found:
        return ""
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}: start the job as it was when it wrote {resume}, or take the change on purpose with "
        "--accept-changes"
    )
