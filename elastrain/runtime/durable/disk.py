"""The place where this member writes checkpoints, the job's claim to it, and the checkpoints that are kept there.

On local disks, a place has the parts of one node. One member of each node, its keeper, writes the loop's state and the
manifest there, and reads everything back. An older checkpoint is removed once every keeper has verified a newer one.
The writer thread calls everything except `open`, `take_over` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import Resume, changed
from elastrain.errors import ConfigError
from elastrain.snapshot.durable.errors import CheckpointError, TakenError
from elastrain.snapshot.durable.manifest import (
    BUFFERS,
    LOOP,
    Manifest,
    Part,
    PlainValue,
    decode,
    encode,
    name_of,
    place_in_time,
)
from elastrain.snapshot.durable.owner import Claim, claim, hold_for, owner_of
from elastrain.snapshot.durable.places.port import CheckpointPlace, place_at
from elastrain.snapshot.durable.plain import pack_named
from elastrain.snapshot.durable.publishing import mark_verified, publish, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import clear, tidy
from elastrain.snapshot.durable.writing import PartWriter

Attachments = Mapping[str, tuple[Part, ...]]


class KeeperTold(PlainValue, frozen=True):
    """A keeper's report to the member that writes the manifest, sent as text."""

    attachments: dict[str, tuple[Part, ...]]
    """The attachments on the keeper's disk."""
    verified: tuple[str, ...]
    """Names of checkpoints whose parts on this disk were all read back."""


class KeptCopy(PlainValue, frozen=True):
    """Text that every keeper gets when a checkpoint is complete, with the manifest for its disk."""

    manifest: str
    verified: str
    """The newest checkpoint that all keepers have verified; empty if there is none."""


_TOLD, _KEPT = msgspec.json.Decoder(KeeperTold), msgspec.json.Decoder(KeptCopy)


def told_by_keepers(loops: Sequence[str]) -> tuple[dict[str, tuple[Part, ...]], str]:
    """Return all copies of the attachments, and the newest checkpoint that every keeper has verified."""
    told = [_TOLD.decode(each) for each in loops]
    names = sorted({name for each in told for name in each.attachments})
    copies = {name: tuple(part for each in told for part in each.attachments.get(name, ())) for name in names}
    return copies, newest_of_all(each.verified for each in told)


def newest_of_all(verified: Iterable[Iterable[str]]) -> str:
    """Return the newest name that is in all collections, or an empty text."""
    sets = [set(each) for each in verified]
    common = set.intersection(*sets) if sets else set()
    return max(common, key=lambda name: place_in_time(name) or (-1, -1), default="")


def kept_text(manifest: Manifest, verified: str) -> str:
    """Return a `KeptCopy` as text. Raises CheckpointError as `manifest.encode`."""
    return msgspec.json.encode(KeptCopy(manifest=encode(manifest).decode(), verified=verified)).decode()


class CheckpointDisk:
    """The claim of this member's job to a place, and the checkpoints that were verified there."""

    def __init__(
        self, options: CheckpointOptions, job: str, log: Callable[..., None], resume: Resume | None = None
    ) -> None:
        self.place = place_at(options.place)
        self.is_local = options.is_local
        self._options = options
        self._job = job
        self._log = log
        self._resume = resume
        self._claim: Claim | None = None
        self._wrote = ""
        """The newest checkpoint of which this member, as the keeper of its node, wrote the loop's state."""
        self._verified: list[str] = []

    def open(self) -> None:
        """Claim the place now, unless it is to be taken over from another job later (see `take_over`).

        Raises ConfigError if it belongs to another job. Other problems are logged here, and raised when the place is
        used.
        """
        self._claim_by(hold_for if self._resumes() else claim)

    def take_over(self) -> None:
        """Claim the place of the job that this job resumes from, once the start succeeded. Raises as `open`."""
        if self._claim is None and self._resumes():
            self._claim_by(partial(claim, take_over=True))

    def _resumes(self) -> bool:
        """Return True if this job resumes from the checkpoints in the place.

        A node may have only older checkpoints, if other nodes alone wrote the newest ones.
        """
        if self._options.resumes or not self._options.resumed_job:
            return self._options.resumes
        try:
            before = owner_of(self.place)
            if before is not None and before.job in (self._options.resumed_job, self._job):
                return True
            # Jobs in between may have written nothing here. Checkpoints count if they are of the same training.
            there, resume = visible(self.place), self._resume
            newest = Checkpoint.open([self.place], there[-1]).manifest if there else None
            return newest is not None and resume is not None and not changed(resume, newest.spec)
        except CheckpointError:  # reported when the place is claimed
            return False

    def _claim_by(self, ask: Callable[[CheckpointPlace, str], Claim | None]) -> None:
        try:
            self._claim = ask(self.place, self._job)
        except TakenError as error:
            raise ConfigError(str(error)) from None
        except CheckpointError as error:
            self._log("checkpoint_place", reason=str(error))

    def close(self) -> None:
        """Release the claim."""
        if self._claim is not None:
            self._claim.release()

    def check(self) -> None:
        """Raise TakenError if another job has taken the place over."""
        if self._claim is not None:
            self._claim.check()

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a visible checkpoint of this job, or None. Raises CheckpointError."""
        # A job that resumed from an older checkpoint repeats steps, so the name may be that of another job.
        found = Checkpoint.open([self.place], name).manifest if name in visible(self.place) else None
        return found if found is not None and found.job == self._job else None

    def attach(
        self, checkpoint: str, me: str, loop: tuple[str, Sequence[Tensor]], buffers: Mapping[str, Tensor]
    ) -> dict[str, tuple[Part, ...]]:
        """Write the loop's state and the model's buffers. Raises CheckpointError."""
        self.check()
        writer = PartWriter(self.place, checkpoint, writer=f"{me}-loop")
        try:
            found: dict[str, tuple[Part, ...]] = {LOOP: (writer.attach(*loop),)}
            if buffers:
                found[BUFFERS] = (writer.attach(*pack_named(buffers)),)
            writer.finish()
        finally:
            writer.give_up()
        return found

    def told(self, checkpoint: str, attachments: Attachments) -> str:
        """Return the report of this keeper about the attachments that it has written."""
        self._wrote = checkpoint
        return msgspec.json.encode(
            KeeperTold(attachments=dict(attachments), verified=tuple(self._verified[-self._options.keep - 1 :]))
        ).decode()

    def remove_older(self, life: int, step: int) -> None:
        """Remove old checkpoints after that of `step` is complete or given up. Raises CheckpointError.

        On local disks, `keep` does that instead.
        """
        if not self.is_local:
            self.check()  # do not touch checkpoints of another job
            options = self._options
            for sentence in tidy(self.place, keep=options.keep, age_s=options.keep_for_s, over=(life, step)):
                self._log("checkpoint_tidied", reason=sentence)

    def keep(self, life: int, step: int, text: str) -> None:
        """Publish the manifest of a complete checkpoint here, remove old ones, and verify the new one.

        Only the keeper of a node does this. Raises CheckpointError; other nodes still have the checkpoint then.
        """
        name, told = name_of(life, step), _KEPT.decode(text)
        if self._wrote != name:
            return
        self.check()
        if name not in visible(self.place):
            publish(self.place, decode(told.manifest.encode(), f"the manifest of {name}"))
        if told.verified in visible(self.place):
            mark_verified(self.place, told.verified)
            options = self._options
            for sentence in clear(self.place, keep=options.keep, age_s=options.keep_for_s):
                self._log("checkpoint_tidied", reason=sentence)
        problems = Checkpoint.open([self.place], name).verify(digests=False)
        if problems:
            self._log("checkpoint_tidied", reason=f"{name} is damaged, and nothing is removed for it: {problems[0]}")
        else:
            self._verified.append(name)
