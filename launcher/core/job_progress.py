"""How far the job is, by all that this agent has heard; and why things happened, in a few sentences for `status`."""

from __future__ import annotations

from elastrain.agent_messages import Progress, Redone
from elastrain.launcher.values import Command, Log

_REASONS_MAX = 8


class JobProgress:
    """How far the job is: only committed steps count."""

    def __init__(self) -> None:
        self.due = False
        """The first commit may have been made, on this node or another, also where nobody has told of it."""
        self.to_commit: set[str] = set()
        """Members of this node that wait with the first commit until the store knows that it is due."""
        self.begun = False
        """A step has been committed, on this node or another."""
        self.step: int | None = None
        self.loss: float | None = None
        self.samples: int | None = None
        self.redone_pairs = 0
        """How many (block, run) pairs pipelines have computed once more after losses."""
        self._redone_in = 0
        self._step_at_new_links: int | None = None
        self.reasons: list[str] = []
        """The newest last."""

    def note_new_links(self) -> None:
        """Note that members make the links between their nodes anew."""
        self._step_at_new_links = self.step

    @property
    def is_as_with_new_links(self) -> bool:
        """Whether no step has been committed since the links were made anew."""
        return self.step == self._step_at_new_links

    def take(self, message: Progress) -> None:
        if self.step is None or message.step > self.step:
            self.step, self.loss, self.samples = message.step, message.loss, message.samples

    def redo(self, message: Redone) -> list[Command]:
        """Count it once for the view, whichever of its members tells it first."""
        if message.generation <= self._redone_in:
            return []
        self._redone_in = message.generation
        self.redone_pairs += message.pairs
        return [Log(event="redone", fields={"step": message.step, "pairs": message.pairs})]

    def explain(self, reason: str) -> None:
        self.reasons = [*self.reasons, reason][-_REASONS_MAX:]
