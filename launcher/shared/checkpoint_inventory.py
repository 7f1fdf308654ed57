"""Inventories of checkpoints on local disks, and the choice of the checkpoint to start from.

Each node reports the parts on its own disk (`DiskOffer`). `join` finds the newest checkpoint that is complete on all
disks together. Pure: no disk is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain.base.resume import NodeDisk, Resume

_SOME = 3


@dataclass(frozen=True, kw_only=True)
class DiskOffer:
    """Parts of one checkpoint on the disk of one node. Without a manifest there, only `name` and `files` are known."""

    name: str
    files: tuple[str, ...]
    """Names of the undamaged files with parts."""
    content: str = ""
    """Value of `Manifest.content`, which differs between two checkpoints of the same name."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Sets of files, without duplicates. Each set lists the files that hold the same state; one of them is needed."""
    resume: Resume | None = None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Result of `join`: the chosen checkpoint, or None if no node has a checkpoint or none is complete.

    `reasons` has one clause for each newer checkpoint that was passed over.
    """

    resume: Resume | None
    reasons: tuple[str, ...] = ()

    @property
    def lacking(self) -> str:
        """Reason why the job may not begin although some node has a checkpoint, or "" if it may begin."""
        return "; ".join(self.reasons) if self.resume is None else ""


Offered = Sequence[tuple[NodeDisk, Sequence[DiskOffer]]]


def join(offered: Offered, *, is_wary: bool = False) -> Joined:
    """Return the newest checkpoint that is complete on all disks together.

    Args:
        offered: the inventory of each node's disk.
        is_wary: set if the last life made no newer checkpoint. Parts on a disk without a manifest could not be checked
            there, and may be damaged. An older checkpoint that is complete without such parts is then preferred.
    """
    if is_wary:
        found = _join([(disk, [each for each in offers if each.resume is not None]) for disk, offers in offered])
        if found.resume is not None:
            return found
    return _join(offered)


def _join(offered: Offered) -> Joined:
    candidates = {(each.name, each.content) for _, offers in offered for each in offers if each.resume is not None}
    reasons: list[str] = []
    for name, content in sorted(candidates, reverse=True):
        # File names are random, so files of another checkpoint of this name do not match any need.
        named = [(disk, each) for disk, offers in offered for each in offers if each.name == name]
        having = [(disk, each) for disk, each in named if each.content in ("", content)]
        files = {file for _, each in having for file in each.files}
        whole = [each for _, each in having if each.resume is not None]
        missing = min(([need for need in each.needs if files.isdisjoint(need)] for each in whole), key=len)
        if not missing:
            # Lives of the newer checkpoints that were passed over count, too, on every disk.
            counted = [each for _, offers in offered for each in offers] if reasons else [each for _, each in having]
            resume = _resume(whole[0], [disk for disk, _ in having], counted)
            return Joined(resume=resume, reasons=tuple(reasons))
        names = ", ".join(" or ".join(need) for need in missing[:_SOME]) + (" …" if len(missing) > _SOME else "")
        reasons.append(f"{name} is passed over: no disk that is here has a good copy of {names}")
    return Joined(resume=None, reasons=tuple(reasons))


def _resume(offer: DiskOffer, disks: Sequence[NodeDisk], counted: Sequence[DiskOffer]) -> Resume:
    assert offer.resume is not None
    place = f"the disks of {', '.join(disk.node for disk in disks)}"
    before = max(each.resume.lives_before for each in counted if each.resume is not None)
    return replace(offer.resume, place=place, disks=tuple(disks), lives_before=before)
