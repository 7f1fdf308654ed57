"""The place of a member in a script that takes the whole job for one process."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from elastrain.integrations.process_state import LONG_WORK_TIMEOUT_S

if TYPE_CHECKING:
    from elastrain.runtime.job import Job


class OneProcess(ABC):
    """The part of an accelerator that tells processes apart: there is one, and only `is_main_process` differs."""

    if TYPE_CHECKING:
        job: Job

    @property
    @abstractmethod
    def is_playing_past(self) -> bool:
        """True on a member that goes through steps before its first one."""

    num_processes = 1
    process_index = local_process_index = 0
    use_distributed = False
    is_last_process = True

    @property
    def is_main_process(self) -> bool:
        """True on the member that writes and prints."""
        return self.job.is_main and not self.is_playing_past

    is_local_main_process = is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main member."""
        if self.is_main_process:
            sys.stdout.write(kwargs.get("sep", " ").join(map(str, args)) + kwargs.get("end", "\n"))
            sys.stdout.flush()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main member run the code inside first; see `Job.main_first`."""
        return nullcontext() if self.is_playing_past else self.job.main_first(LONG_WORK_TIMEOUT_S)

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does something on the main member only."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_main_process else None

    on_local_main_process = on_main_process

    def wait_for_everyone(self) -> None:
        """Return at once: members wait for each other in every step."""
        return

    def gather(self, tensor: Any) -> Any:
        """Return what is given: every member has all samples of the evaluation, in order."""
        return tensor

    gather_for_metrics = pad_across_processes = gather

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return what is given: the job is one process to the script."""
        return tensor
