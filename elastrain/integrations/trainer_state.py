"""The state of a trainer's loop that goes to members which join later, and the checkpoint that all begin from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from elastrain.base.environment import run_folder
from elastrain.errors import ConfigError

_OF_THE_MEMBER = frozenset({"is_world_process_zero", "is_local_process_zero", "stateful_callbacks"})
_TIMES = ("_runtime", "_per_second")
"""Ends of the names of logged times, which differ between members."""
_FIGURES = ("_globalstep_last_logged", "_total_loss_scalar", "current_flos")


class CarriedState:
    """State that a trainer keeps between two steps, for `job.register`: its own, its figures, and that of callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told: tuple[int, frozenset[str]] = (0, frozenset())
        self._saved: list[int] = []
        """Steps behind which a checkpoint was written."""

    def note_saved(self, folder: str) -> None:
        """Note that a checkpoint is written now. If the best model so far has one, it is the best checkpoint."""
        state = self._trainer.state
        self._saved.append(state.global_step)
        if state.best_global_step in self._saved:
            state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{state.best_global_step}")

    def without_told(self, line: dict[str, float]) -> dict[str, float]:
        """Return the values of a line that this step has not logged yet, such as the epoch."""
        step, told = self._trainer.state.global_step, self._told[1]
        told = told if self._told[0] == step else frozenset()
        self._told = (step, told | line.keys())
        return {name: value for name, value in line.items() if name not in told}

    def state_dict(self) -> dict[str, Any]:
        """Return what is equal on all members, as plain data."""
        trainer = self._trainer
        state = {each.name: getattr(trainer.state, each.name) for each in fields(trainer.state)}
        history = [{n: v for n, v in line.items() if not n.endswith(_TIMES)} for line in state.pop("log_history")]
        return {
            "state": {name: value for name, value in state.items() if name not in _OF_THE_MEMBER},
            "history": history,
            "figures": {name: getattr(trainer, name) for name in _FIGURES},
            "loss": float(trainer._tr_loss),
            "callbacks": [dict(each.state()["attributes"]) for each in self._stateful()],
            "saved": list(self._saved),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it in place."""
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = list(state["history"])
        for name, value in state["figures"].items():
            setattr(trainer, name, value)
        trainer._tr_loss.fill_(state["loss"])
        for callback, attributes in zip(self._stateful(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        self._saved = list(state["saved"])

    def _stateful(self) -> Iterator[Any]:
        """Yield the callbacks that have a state, and the control of the loop."""
        for each in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if callable(getattr(each, "state", None)):
                yield each


def agreed_checkpoint(folder: str) -> str:
    """Return the newest checkpoint in the folder, as the first member of the job has found it.

    A member that joins later would find one that this job has written. Raises ConfigError if there is none.
    """
    run = run_folder()
    noted = None if run is None else run / "resumed_from"
    if noted is not None and noted.exists():
        return noted.read_text()
    steps = [path for path in Path(folder).glob("checkpoint-*") if (path / "trainer_state.json").exists()]
    if not steps:
        raise ConfigError(f"resume_from_checkpoint=True finds no checkpoint in {folder}: give its path, or begin anew")
    found = str(max(steps, key=lambda path: int(path.name.rpartition("-")[2])))
    if noted is not None:
        mine = noted.with_suffix(f".{os.getpid()}")
        mine.write_text(found)
        try:
            os.link(mine, noted)
        except FileExistsError:
            found = noted.read_text()
        mine.unlink()
    return found


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Give all layers their modes back at the end. A newcomer enters the next step without this evaluation."""
    kept = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in kept:
            module.training = is_training
