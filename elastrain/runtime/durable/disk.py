"""Where this member writes checkpoints: the place, the job's claim to it, and what is kept there when one is complete.

On local disks a place has the parts of one node. One member of each node, its keeper, writes the loop's state there,
puts the manifest beside it, and reads back what lies there. An older checkpoint goes once every node has told that
its part of a newer one was read back whole. All but `open`, `take_over` and `close` is for the writer's thread.
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
    """What a keeper has written beside the shards, and what it has verified: text for the member that collects."""

    attachments: dict[str, tuple[Part, ...]]
    verified: tuple[str, ...]
    """Checkpoints of which all that lies on its disk was read back whole."""


class KeptCopy(PlainValue, frozen=True):
    """What every keeper puts on its disk when a checkpoint is complete, as text."""

    manifest: str
    verified: str
    """The newest checkpoint that all of them have verified; empty: none."""


_TOLD, _KEPT = msgspec.json.Decoder(KeeperTold), msgspec.json.Decoder(KeptCopy)


def told_by_keepers(loops: Sequence[str]) -> tuple[dict[str, tuple[Part, ...]], str]:
    """All copies of the attachments, and the newest checkpoint that every keeper has verified."""
    told = [_TOLD.decode(each) for each in loops]
    names = sorted({name for each in told for name in each.attachments})
    copies = {name: tuple(part for each in told for part in each.attachments.get(name, ())) for name in names}
    return copies, newest_of_all(each.verified for each in told)


def newest_of_all(verified: Iterable[Iterable[str]]) -> str:
    """The newest name that is in every one of them; empty where none is."""
    sets = [set(each) for each in verified]
    common = set.intersection(*sets) if sets else set()
    return max(common, key=lambda name: place_in_time(name) or (-1, -1), default="")


def kept_text(manifest: Manifest, verified: str) -> str:
    """Raises CheckpointError, as `manifest.encode`."""
    return msgspec.json.encode(KeptCopy(manifest=encode(manifest).decode(), verified=verified)).decode()


class CheckpointDisk:
    """Owns the claim, and which checkpoints were verified here."""

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
        """The newest checkpoint of which this member has written the loop's state: it is its keeper."""
        self._verified: list[str] = []

    def open(self) -> None:
        """Claim the place, if it is not to be taken over from another job: see `take_over`.

        Raises ConfigError where it is another job's; other problems are said when it is used.
        """
        self._claim_by(hold_for if self._resumes() else claim)

    def take_over(self) -> None:
        """The job goes on from what lies here: nothing refuses it any more. Raises ConfigError, as `open`."""
        if self._claim is None and self._resumes():
            self._claim_by(partial(claim, take_over=True))

    def _resumes(self) -> bool:
        """A node may have older checkpoints of a job whose newest ones were written by the others alone."""
        if self._options.resumes or not self._options.resumed_job:
            return self._options.resumes
        try:
            before = owner_of(self.place)
            if before is not None and before.job in (self._options.resumed_job, self._job):
                return True
            # Jobs in between may have come to no checkpoint, or have gone on without this node: the training counts.
            there, resume = visible(self.place), self._resume
            newest = Checkpoint.open([self.place], there[-1]).manifest if there else None
            return newest is not None and resume is not None and not changed(resume, newest.spec)
        except CheckpointError:  # said by whoever claims the place
            return False

    def _claim_by(self, ask: Callable[[CheckpointPlace, str], Claim | None]) -> None:
        try:
            self._claim = ask(self.place, self._job)
        except TakenError as error:
            raise ConfigError(str(error)) from None
        except CheckpointError as error:
            self._log("checkpoint_place", reason=str(error))

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def check(self) -> None:
        """Raises TakenError where another job has taken the place over."""
        if self._claim is not None:
            self._claim.check()

    def find(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint of this job that is visible here. Raises CheckpointError."""
        # A job that goes on from an older one comes past the same steps as the job that wrote the newer ones.
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
        """This member is the keeper of its node, and has written these."""
        self._wrote = checkpoint
        return msgspec.json.encode(
            KeeperTold(attachments=dict(attachments), verified=tuple(self._verified[-self._options.keep - 1 :]))
        ).decode()

    def remove_older(self, life: int, step: int) -> None:
        """Than this one, which is complete, or given up. On local disks `keep` does it. Raises CheckpointError."""
        if not self.is_local:
            self.check()  # else it is another job's by now, and not touched
            options = self._options
            for sentence in tidy(self.place, keep=options.keep, age_s=options.keep_for_s, over=(life, step)):
                self._log("checkpoint_tidied", reason=sentence)

    def keep(self, life: int, step: int, text: str) -> None:
        """The checkpoint is complete: have the manifest here too, remove what may go, and read back what lies here.

        Nothing happens on a member that is no keeper. Raises CheckpointError; others have the checkpoint.
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
