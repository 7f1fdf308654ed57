"""Checkpoints on local disks: what each node has of them, and which one all of them together can start from.

A decision over values: no disk is looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain.base.resume import NodeDisk, Resume

_SOME = 3


@dataclass(frozen=True, kw_only=True)
class DiskOffer:
    """What the disk of one node has of a checkpoint. Without its manifest there only `name` and `files` are known."""

    name: str
    files: tuple[str, ...]
    """Those with parts that are good."""
    content: str = ""
    """`Manifest.content`: two checkpoints of one name are told apart by it."""
    needs: tuple[tuple[str, ...], ...] = ()
    """For each shard, and what else belongs to it, the files that have it: one of them is needed. Each set once."""
    resume: Resume | None = None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """`resume` is None where nobody offers anything, or nothing that is offered is complete: `lacking` says why then.

    `reasons`: a clause for each newer checkpoint that was passed over.
    """

    resume: Resume | None
    reasons: tuple[str, ...] = ()

    @property
    def lacking(self) -> str:
        """Why the job may not begin yet, though some node has a checkpoint; empty where it may."""
        return "; ".join(self.reasons) if self.resume is None else ""


Offered = Sequence[tuple[NodeDisk, Sequence[DiskOffer]]]


def join(offered: Offered, *, is_wary: bool = False) -> Joined:
    """The newest checkpoint of which the disks together have everything.

    `is_wary`: the last life came no further. A copy on a disk without the manifest could not be checked there, and may
    be damaged: so an older checkpoint that is whole without such copies is taken, if there is one.
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
        # Nobody else draws the names of its files: those of another checkpoint of this name neither help nor harm.
        named = [(disk, each) for disk, offers in offered for each in offers if each.name == name]
        having = [(disk, each) for disk, each in named if each.content in ("", content)]
        files = {file for _, each in having for file in each.files}
        whole = [each for _, each in having if each.resume is not None]
        missing = min(([need for need in each.needs if files.isdisjoint(need)] for each in whole), key=len)
        if not missing:
            # Where newer ones are passed over, their lives count on every disk.
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
