"""After step 1 the second member is killed. Whoever gets its blocks tries them at once, while no value is there yet.

The first value that comes is held back until the script has tried every layer. A line of `tried-<member>.txt` is a
moment ("coming", "here"), a layer, and what a forward of it gave: its values, NaN, or why it was refused.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import elastrain
from elastrain.runtime.model.flat_model import ModelState
from tests.integration.scripts.piped_training import Model, Samples

DEADLINE_S = 30.0
ME = os.environ.get("ELASTRAIN_MEMBER", "alone")
FOLDER = Path(os.environ["ELASTRAIN_RUN_DIR"])


class HeldBack:
    """The first published values of blocks that come."""

    def __init__(self) -> None:
        self.are_coming, self.may_come, self.is_due = threading.Event(), threading.Event(), False
        self._take = ModelState.take_parameters

    def take_parameters(self, model: ModelState, *values: Any) -> None:
        if self.is_due:
            self.are_coming.set()
            self.may_come.wait(DEADLINE_S)
        self._take(model, *values)

    def let_come(self) -> None:
        self.is_due = False
        self.may_come.set()


def wait_for(*files: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(each.exists() for each in files) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def tried(model: Model) -> list[tuple[int, str]]:
    """What a forward of each layer gives outside of a step."""
    found = []
    for index, layer in enumerate(model.layers):
        try:
            values = layer(torch.ones(1, 16))
            found.append((index, "NaN" if values.isnan().any() else "values"))
        except elastrain.ConfigError as error:
            found.append((index, str(error)))
    return found


def try_what_comes(model: Model, held: HeldBack) -> None:
    """Return when this member, or another one, has tried what has come to it."""
    done, deadline_s = FOLDER / "tried", time.monotonic() + DEADLINE_S
    while not held.are_coming.is_set() and not done.exists() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    if not held.are_coming.is_set():
        held.let_come()
        return
    lines = [("coming", *each) for each in tried(model)]
    absent = {index for _, index, what in lines if what not in ("values", "NaN")}
    held.let_come()
    while time.monotonic() < deadline_s:
        now = tried(model)
        if any(what == "values" for index, what in now if index in absent):
            break
        time.sleep(0.001)
    lines += [("here", *each) for each in now]
    (FOLDER / f"tried-{ME}.txt").write_text("".join(f"{when} {index} {what}\n" for when, index, what in lines))
    done.touch()


def main() -> None:
    torch.set_num_threads(1)
    held = HeldBack()

    def take_parameters(model: ModelState, *values: Any) -> None:
        held.take_parameters(model, *values)

    ModelState.take_parameters = take_parameters  # type: ignore[method-assign]
    job = elastrain.init(seed=3)
    model = Model(width=16, layers=6)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=12, micro_batch_size=2)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=4):
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
        if step.number == 1 and ME == "m1":
            wait_for(FOLDER / "m0-waits", FOLDER / "m2-waits")
            os.kill(os.getpid(), signal.SIGKILL)
        if step.number == 1 and ME != "alone":
            held.is_due = True
            (FOLDER / f"{ME}-waits").touch()
            try_what_comes(model, held)


if __name__ == "__main__":
    main()
