"""The state that the script has loaded before the loop, and the decision whether the job begins from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from elastrain.base.processes import say
from elastrain.base.resume import LOADED, newer
from elastrain.runtime.assembly import Prepared
from elastrain.runtime.loop_state.own_checkpoint import OwnCheckpoint


class LoadedState:
    """The state of the optimizer that the script has loaded. Only the main thread uses it.

    Args:
        prepared: The job.
        registered: What the script has registered. An `OwnCheckpoint` says how many steps the state has made.
    """

    def __init__(self, prepared: Prepared, registered: Iterable[Any]) -> None:
        self._prepared = prepared
        self._own = next((each for each in registered if isinstance(each, OwnCheckpoint)), None)
        self.told: dict[str, str] = {}
        """Digest of what the job begins from, if the script has loaded it. Members compare it in the first step."""
        self._begins = ""
        """Sentence that says from which of two states the job begins."""
        self._is_there = False

    def take(self) -> None:
        """Let the job begin from the loaded state, unless the checkpoint that it resumes from is as new."""
        prepared, stored, own = self._prepared, self._prepared.stored, self._own
        loaded = prepared.facade.take_loaded()
        # An optimizer may have no state, and the checkpoint of a library the model's alone.
        self._is_there = bool(loaded) or (stored is not None and own is not None and own.made > 0)
        if not self._is_there:
            return
        cut, is_newer = prepared.whole.cut(loaded), True
        if stored is not None:
            counts = stored.counts(cut) if own is None and prepared.whole.is_first_life else None
            is_newer, self._begins = newer(own.counts if own is not None else counts, prepared.first_step)
        if is_newer:
            prepared.optimizer.loaded = cut if loaded else None
            self.told = {LOADED: prepared.whole.digest(loaded, is_whole=stored is not None)}
            if stored is not None:
                stored.give_way()

    def settings(self, *, has_moved: bool) -> dict[str, Any]:
        """Return settings for members to compare. `has_moved`: the script has loaded the state of a scheduler."""
        found = {} if self._own is None else dict[str, Any](self._own.described())
        if (self._is_there or has_moved) and self._prepared.stored is not None:
            # The script's own settings are hidden by what it has loaded.
            has_layers = self._own is not None and self._own.made > 0
            found |= self._prepared.stored.taken_over(has_layers=has_layers)
        return found

    def forget(self) -> None:
        """Forget the digest, as a step is committed."""
        self.told = {}

    def entered(self, step: int, is_first: Callable[[], bool]) -> None:
        """Forget all if other members gave this one what counts, else let rank 0 say what the job begins from."""
        if step > self._prepared.first_step:
            self.told, self._prepared.optimizer.loaded = {}, None
        elif self._begins and is_first():
            say(self._begins)
