"""The checkpoint that a life of the job starts from, and the check that the job's spec still fits. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

SKIPPED = "steps of an earlier job"
"""Setting: steps whose samples were left out, as an earlier job has used them."""
OWN = "steps of the script's own checkpoint"
"""Setting: steps of the script's own checkpoints that come before the job's step 0."""
MAY_CHANGE = frozenset(
    # They decide where the state lies, how often members compare results, and what runs the script. No bit depends on
    # them.
    {"audit", "backups", "cross_check_every", "elastrain", "Python", "NumPy", "stages"}
    # A job that begins from a newer checkpoint of the script's own counts anew; see `own_checkpoint`.
    | {OWN}
)
"""Settings of the spec in which a resumed job may differ from the one that wrote the checkpoint."""

OF_THE_DEVICE = ("device", "device name")
"""Settings that explain differences in those of the machine."""
_OF_THE_MACHINE = (
    *("device ", "device's ", "torch.", "variable ", "deterministic algorithms"),
    *("CPU ", "intra-op threads", "result of a fixed "),
)
"""Beginnings of the names of settings that describe a machine; see `Settings.describe`."""
LOADED = "optimizer state that the script loaded"
"""Setting that members compare which begin the job. A member that joins later uses nothing of what it has loaded."""
LAYERS = "layers' switches and numbers"
"""Setting: digest of the attributes of the layers."""
_HASHES = (LAYERS, "model")


@dataclass(frozen=True, kw_only=True)
class NodeDisk:
    """A node whose own disk has parts of a checkpoint. Its agent lets other nodes read them."""

    node: str
    door: str
    """Name of the agent in the handshake."""
    endpoint: str
    """HOST:PORT of the agent; empty if the job has no other node."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint that a life of the job starts from. All its members use the same one, also those that join later."""

    place: str
    """Directory or address of the checkpoints."""
    name: str
    """Folder of this checkpoint in `place`."""
    step: int
    """The committed step that the state belongs to. -1: only parameters, of a model that was trained elsewhere."""
    job: str = ""
    """The job that wrote the checkpoint; empty if unknown."""
    scale: float | None = None
    """Loss scale of the next step; `clean_steps` belongs to it. None: the rule's initial scale."""
    clean_steps: int = 0
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all members of the writing job had in common; empty if unknown."""
    changes: tuple[str, ...] = ()
    """Changes of the spec that users accepted before the checkpoint was written, one sentence each."""
    accepts_changes: bool = False
    """True if the user accepts that the spec differs from the checkpoint's."""
    lives_before: int = 0
    """An offset for the life numbers in names of this job's checkpoints, so that they sort after all existing ones."""
    disks: tuple[NodeDisk, ...] = ()
    """Nodes whose disks hold the parts, under layout `local`. `place` then only describes them to people."""

    def __str__(self) -> str:
        return f"{self.name} in {self.place}"


def as_text(resume: Resume) -> str:
    """Return the value as text for an environment variable; see `from_text`."""
    return msgspec.json.encode(resume).decode()


def from_text(text: str) -> Resume:
    """Parse the text of `as_text`. Raises ValueError."""
    return _DECODER.decode(text)


_DECODER = msgspec.json.Decoder(Resume)


def is_taken_over(name: str) -> bool:
    """Return True if a member that joins later takes this setting from the others, whatever its own script has set.

    A script may derive such a setting from the number of members, which may have changed since.
    """
    return name == "schedulers" or " of parameter group " in name or " of scheduler " in name


def changed(resume: Resume, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the settings in which `spec` differs from the checkpoint's, the most telling first.

    Of a machine with another device, only the device is named.
    """
    # The samples that are left out follow a checkpoint of the script's own, of which a library has told the job.
    may_change = MAY_CHANGE | {SKIPPED} if OWN in spec else MAY_CHANGE
    differing = [n for n, its in resume.spec.items() if n not in may_change and spec.get(n, "(unset)") != its]
    if device := next((name for name in OF_THE_DEVICE if name in differing), None):
        differing = [n for n in differing if n == device or not n.startswith(_OF_THE_MACHINE)]
    # With another optimizer or script other settings differ too, and a hash tells a reader little: the telling names
    # come first.
    return tuple(
        sorted(
            differing,
            key=lambda n: (n != "optimizer", n not in OF_THE_DEVICE, n in _HASHES, " of scheduler " in n, n),
        )
    )


def changes(resume: Resume, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences of `changed` as clauses, with both values."""
    return tuple(
        f"its {name} is {spec.get(name, '(unset)')}, the checkpoint's is {resume.spec[name]}"
        for name in changed(resume, spec)
    )


def changes_so_far(resume: Resume | None, spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return all changes accepted so far, one sentence each, for the checkpoints that a job with this spec writes."""
    if resume is None:
        return ()
    now = f" (accepted when the job went on after step {resume.step})"
    return (*resume.changes, *(change + now for change in changes(resume, spec)))


def newer(counts: tuple[int, int] | None, step: int) -> tuple[bool, str]:
    """Return True if a job that resumes begins from what its script has loaded, and the sentence that says so.

    Args:
        counts: The optimizer's numbers of steps in the checkpoint and in the loaded state; None if they do not count.
        step: First step of the job.
    """
    goes_on = f"step {step} begins from the job's checkpoint, not from the optimizer state that the script loaded"
    if counts is None:
        return False, goes_on
    stored, loaded = counts
    if loaded <= stored:
        return False, f"{goes_on}: the checkpoint's has made {stored} steps, and the script's {loaded}"
    return True, (
        f"step {step} begins from the optimizer state and the parameters that the script loaded, which have made "
        f"{loaded} steps, not from the job's checkpoint, which has made {stored}"
    )


def refusal(resume: Resume, spec: Mapping[str, Any]) -> str:
    """Return why a job with this spec may not resume from the checkpoint, in one clause, or "" if it may."""
    found = () if resume.accepts_changes else changes(resume, spec)
    if not found:
        return ""
    more = f" (and {len(found) - 1} more differ)" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}: start the job as it was when it wrote {resume}, or take the change on purpose with "
        "--accept-changes"
    )
