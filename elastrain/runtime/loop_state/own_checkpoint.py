"""A checkpoint of the script's own beside the one that the job resumes from: which of the two the job begins from."""

from __future__ import annotations

from collections.abc import Mapping

from elastrain.base.resume import OWN, SKIPPED, Resume
from elastrain.errors import ConfigError


class OwnCheckpoint:
    """The script's own checkpoint, of which a library counts the steps, beside the one that the job resumes from.

    The newer one is taken. The library counts `behind` steps more than the job, whose numbers go on from its
    checkpoint.

    Args:
        made: Steps that the script's own checkpoint has made; 0 without one.
        resume: Checkpoint that the job resumes from, if it does.
    """

    def __init__(self, made: int, resume: Resume | None) -> None:
        first = 0 if resume is None else resume.step + 1
        # Checkpoints of older versions do not have the first setting.
        before = 0 if resume is None else int(resume.spec.get(OWN, resume.spec.get(SKIPPED, 0)))
        self.made = made
        self.counts = before + first, made
        """Steps that the job's checkpoint and the script's own one have made."""
        self.is_newer = made > before + first
        self.behind = made - first if self.is_newer else before
        """Steps of the script's own checkpoints that come before the job's step 0."""

    def described(self) -> dict[str, int]:
        """Return the setting for members to compare."""
        return {OWN: self.behind} if self.behind else {}

    def state_dict(self) -> dict[str, int]:
        """Return the place, for members that join later and for checkpoints."""
        return {"behind": self.behind}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Compare the place with the job's. Raises ConfigError if they differ."""
        if state["behind"] != self.behind:
            raise ConfigError(
                f"the job has begun behind step {state['behind']} of the script's own checkpoints, and this process "
                f"begins behind step {self.behind}: name a checkpoint that all members find"
            )
