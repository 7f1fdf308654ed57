"""The trackers of an accelerator, which are loggers of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import elastrain
from elastrain.errors import ConfigError
from elastrain.integrations.script_loop import ScriptLoop
from elastrain.runtime.job import Job


class Trackers:
    """The loggers of a script, and the values that it logs in a body before the step is committed."""

    def __init__(self, wanted: Sequence[Any], folder: str | None) -> None:
        self.loggers = wanted
        self._folder = Path(folder or ".")
        self._held: list[Mapping[str, Any]] = []
        self._is_named = False

    def name(self, project: str, config: Any, options: Mapping[str, Any] | None) -> None:
        """Make the loggers that the script has named."""
        of_wandb = {"config": config, **(options or {}).get("wandb", {})}
        made: dict[str, Callable[[], Any]] = {
            "tensorboard": lambda: elastrain.TensorBoard(self._folder / project),
            "wandb": lambda: elastrain.Wandb(project, dir=self._folder, **of_wandb),
        }
        self.loggers = [made[each]() if isinstance(each, str) else each for each in self.loggers]
        self._is_named = True

    def begin(self, job: Job, behind: int) -> None:
        """Give the job its loggers, behind the steps of the script's own checkpoint."""
        if self._is_named:
            job.loggers(*self.loggers, behind=behind)

    def log(self, job: Job, loop: ScriptLoop, values: Mapping[str, Any]) -> None:
        """Log the values, or hold them until the step is committed. Raises ConfigError in the middle of a step."""
        if loop.is_between:
            job.log(values)
        elif loop.is_sync:
            self._held.append(dict(values))
        else:
            raise ConfigError(
                "accelerator.log(…) in the middle of a step: log where accelerator.sync_gradients is True"
            )

    def committed(self, job: Job) -> None:
        """Log what was held."""
        held, self._held = self._held, []
        for values in held:
            job.log(values)
