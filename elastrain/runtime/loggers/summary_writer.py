"""The part of torch's `SummaryWriter` that a job keeps through losses: scalars and texts of steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from elastrain.errors import ConfigError
from elastrain.runtime.loggers.event_files import TensorBoard

if TYPE_CHECKING:
    from elastrain.runtime.job import Job


class SummaryWriter:
    """A writer for scripts that use torch's `SummaryWriter`: its calls are calls of `job.log`, alike on all members.

    Make it before the loop, in place of `job.loggers`: an `elastrain.TensorBoard` stands behind it.

    Args:
        job: The job.
        log_dir: Folder of the event files.
        purge_step: Number of the job's first step in the files, if the script begins from a checkpoint of its own.
            Later steps of an earlier run in the folder are replaced.

    Raises:
        ConfigError: As `job.loggers`, also after a call of it.
    """

    def __init__(self, job: Job, log_dir: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        if not callable(getattr(job, "log", None)):
            raise ConfigError(
                f"elastrain.SummaryWriter(job, log_dir) takes what elastrain.init() returned; got {job!r:.80}"
            )
        behind = 0 if purge_step is None else purge_step
        if not isinstance(behind, int) or isinstance(behind, bool) or behind < 0:
            raise ConfigError(f"purge_step of SummaryWriter is the number of a step from 0 on; got {purge_step!r}")
        job.loggers(TensorBoard(log_dir), behind=behind)
        self._log = job.log

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Write a number of the step that was just committed.

        Args:
            tag: Name of the value.
            scalar_value: A number, or a tensor or array of one element.
            global_step: Number of the step, as the files have it. It may be left out, and is compared only.

        Raises:
            ConfigError: `global_step` is the number of another step; likewise for all that `job.log` refuses.
        """
        self._log({tag: scalar_value}, step=global_step)

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Write a text of the step that was just committed. Raises ConfigError as `add_scalar` does."""
        self._log({tag: text_string}, step=global_step)

    def flush(self) -> None:
        """Do nothing: the job writes the values of a step before it enters the next one."""

    def close(self) -> None:
        """Do nothing: the job writes the last values at the end of its loop."""

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"elastrain.SummaryWriter has no {name}: it keeps scalars and texts, by add_scalar and add_text; let the "
            "main member write other things by torch's SummaryWriter in a folder of its own"
        )
