"""What programs do to parameters, gradients and states between forwards, backwards and steps. A program of its own.

`python -m tests.integration.offload.lifetimes.touching CASE DIRECTORY [THREADS]` trains twice, in memory and within a
limit, does the same to both between phases, and says `same` where all that touches read, parameters and states agree.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastrain.offload.lifetimes import within as module
from elastrain.offload.lifetimes.pieces.pages import PagePool
from elastrain.offload.lifetimes.within import TrainingWithin
from elastrain.offload.planning.orders import UpdateOrder
from experiments.offload.models import Shape, build

SHAPE = Shape(width=64, layers=4, tokens=32, batch=2, vocabulary=256)
NORM = 0.1
"""Below what gradients have: the norm of each shows in every parameter."""
STEPS = 5
"""Two show what there is to plan; then all orders of touches meet plans."""


class NothingBesides:
    """A meter by which a process takes nothing but what is accounted for: these models are smaller than Python."""

    runs_ahead = False

    def __init__(self) -> None:
        self._held_bytes = 0

    def own_bytes(self) -> tuple[int, int]:
        now_bytes, self._held_bytes = self._held_bytes, -(1 << 40)
        return now_bytes, now_bytes

    def forget_peak(self) -> None:
        pass

    def clock(self) -> float:
        return time.perf_counter()

    def keep_pace(self) -> None:
        pass


def small_memory(_model: nn.Module, limit_bytes: int) -> tuple[PagePool, NothingBesides]:
    """In place of `within.memory_for`: a limit counts from nothing."""
    return PagePool(limit_bytes), NothingBesides()


def made() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """A model, its optimizer, and a limit that holds the parameters and little more."""
    model, _ = build("gpt", SHAPE)
    limit_bytes = sum(each.nbytes for each in model.parameters()) + (256 << 10)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), limit_bytes


@cache
def plain(steps: int) -> list[Tensor]:
    """The parameters after so many steps in memory, without clipping."""
    model, optimizer, _ = made()
    for step in range(steps):
        model(tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@dataclass(kw_only=True)
class Run:
    """One of the two. `seen` is what touches read."""

    model: Any
    optimizer: torch.optim.Optimizer
    training: TrainingWithin | None = None
    seen: list[Tensor] = field(default_factory=list)
    kept: Any = None

    def read(self, *tensors: Tensor) -> None:
        self.seen += [each.detach().clone() for each in tensors]

    def step(self, order: UpdateOrder) -> None:
        if self.training is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.training._planning.order = order
            self.training.step(max_grad_norm=NORM)


Touch = Callable[[Run], None]


def states_of(found: dict[str, Any]) -> list[Tensor]:
    return [value for _, state in sorted(found["state"].items()) for value in state.values()]


def print_parameters(run: Run) -> None:
    assert "nan" not in str(list(run.model.parameters()))
    run.read(*run.model.parameters())


def numpy(run: Run) -> None:
    run.seen += [torch.from_numpy(each.detach().numpy().copy()) for each in run.model.parameters()]


def files(run: Run) -> None:
    """The kernel reads and writes weights: nobody stops it at what is out."""
    with tempfile.TemporaryFile(buffering=0) as file:
        for each in run.model.parameters():
            array = each.detach().numpy()
            array.tofile(file)
            file.write(memoryview(array.reshape(-1)).cast("B"))
        torch.save(run.model.state_dict(), file, _use_new_zipfile_serialization=False)
        file.seek(0)
        for each in run.model.parameters():
            run.seen += [torch.from_numpy(np.fromfile(file, np.float32, each.numel())) for _ in range(2)]
        file.seek(0)
        for each in run.model.parameters():
            file.readinto(memoryview(each.detach().numpy().reshape(-1)).cast("B"))
            file.seek(each.nbytes, os.SEEK_CUR)


def files_of_gradients(run: Run) -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        for each in run.model.parameters():
            file.write(memoryview((0.5 * each.grad).numpy().reshape(-1)).cast("B"))
        file.seek(0)
        for each in run.model.parameters():
            file.readinto(memoryview(each.grad.numpy().reshape(-1)).cast("B"))


def save_states(run: Run) -> None:
    into = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, into)
    into.seek(0)
    found = torch.load(into)
    run.read(*found["model"].values())
    run.read(*states_of(found["optimizer"]))


def copy_states(run: Run) -> None:
    run.read(*states_of(copy.deepcopy(run.optimizer.state_dict())))


def load_states(run: Run) -> None:
    if run.kept is None:
        run.kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    elif len(run.seen) < 1:
        run.model.load_state_dict(run.kept[0])
        run.optimizer.load_state_dict(run.kept[1])
        run.read(torch.zeros(1))


def copy_model(run: Run) -> None:
    twin = copy.deepcopy(run.model)
    other = pickle.loads(pickle.dumps(run.model))  # noqa: S301 - our own bytes
    run.read(*twin.parameters(), *other.parameters())
    for each in (twin, other):
        each(tokens(3)).backward()
        run.read(*(parameter.grad for parameter in each.parameters()))


def move_average(run: Run) -> None:
    if run.kept is None:
        run.kept = [each.detach().clone() for each in run.model.parameters()]
    for mean, each in zip(run.kept, run.model.parameters(), strict=True):
        mean.lerp_(each.detach(), 0.1)
    run.read(*run.kept)


def clamp_weights(run: Run) -> None:
    with torch.no_grad():
        for each in run.model.parameters():
            each.clamp_(-0.05, 0.05)


def clamp_weights_unseen(run: Run) -> None:
    for each in run.model.parameters():
        each.data.clamp_(-0.05, 0.05)


def zero_gradients(run: Run) -> None:
    run.optimizer.zero_grad(set_to_none=False)


def zero_gradients_of_the_model(run: Run) -> None:
    run.model.zero_grad(set_to_none=False)


def forget_gradients(run: Run) -> None:
    if len(run.seen) % 2:
        run.optimizer.zero_grad()
    run.read(torch.zeros(1))


def forget_some_gradients(run: Run) -> None:
    for each in itertools.islice(run.model.parameters(), 0, None, 3):
        each.grad = None


def replace_gradients(run: Run) -> None:
    for each in run.model.parameters():
        each.grad = each.grad.sign()


def clip_gradients(run: Run) -> None:
    run.read(nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))


def clip_gradient_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)


def scale_gradients_unseen(run: Run) -> None:
    for each in run.model.parameters():
        each.grad.data.mul_(0.5)
        each.grad.numpy()[...] *= 4.0


def read_gradients(run: Run) -> None:
    run.read(*(each.grad for each in run.model.parameters()))


def use_optimizer_state(run: Run) -> None:
    if run.kept is None:  # the optimizer makes them in its first step, which may be due only
        run.kept = "the first step"
        return
    for each in run.model.parameters():
        run.read(*(run.optimizer.state[each][name] for name in ("exp_avg", "exp_avg_sq")))


def child(run: Run) -> None:
    """A loader's process, say, that never looks at the model."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


AFTER_BACKWARD: dict[str, Touch] = {
    each.__name__: each
    for each in (
        zero_gradients,
        zero_gradients_of_the_model,
        forget_gradients,
        forget_some_gradients,
        replace_gradients,
        clip_gradients,
        clip_gradient_values,
        scale_gradients_unseen,
        read_gradients,
        files_of_gradients,
        print_parameters,
        save_states,
    )
}
AFTER_STEP: dict[str, Touch] = {
    each.__name__: each
    for each in (
        print_parameters,
        numpy,
        files,
        save_states,
        copy_states,
        load_states,
        copy_model,
        move_average,
        clamp_weights,
        clamp_weights_unseen,
        use_optimizer_state,
        child,
    )
}
OFTEN = [
    "after_backward-zero_gradients",
    "after_backward-forget_gradients",
    "after_backward-clip_gradients",
    "after_backward-scale_gradients_unseen",
    "after_backward-files_of_gradients",
    "after_step-files",
    "after_step-save_states",
    "after_step-copy_model",
    "after_step-clamp_weights_unseen",
]
CASES = [f"after_backward-{each}" for each in AFTER_BACKWARD] + [f"after_step-{each}" for each in AFTER_STEP]


def tokens(step: int) -> Tensor:
    return torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(step))


def begin(directory: str | None) -> Run:
    model, optimizer, limit_bytes = made()
    if directory is None:
        return Run(model=model, optimizer=optimizer)
    module.memory_for = small_memory  # type: ignore[assignment]
    return Run(
        model=model,
        optimizer=optimizer,
        training=module.within(model, optimizer, dirs=[directory], memory_limit=limit_bytes),
    )


def train(run: Run, where: str, touch: Touch, order: UpdateOrder) -> list[Tensor]:
    for step in range(STEPS):
        run.model(tokens(step)).backward()
        if where == "after_backward":
            touch(run)
        run.step(order)
        if where == "after_step":
            touch(run)
    if run.training is not None:
        run.training.close()
    run.read(*run.model.parameters())
    for each in run.model.parameters():
        run.read(*run.optimizer.state[each].values())
    return run.seen


def main() -> None:
    where, _, name = sys.argv[1].partition("-")
    touch = {"after_backward": AFTER_BACKWARD, "after_step": AFTER_STEP}[where][name]
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else 1

    def touched(run: Run) -> None:
        torch.set_num_threads(threads)
        touch(run)
        torch.set_num_threads(1)

    for order in UpdateOrder:
        ours = train(begin(sys.argv[2]), where, touched, order)
        plain = train(begin(None), where, touched, order)
        assert len(ours) == len(plain)
        for number, (mine, other) in enumerate(zip(ours, plain, strict=True)):
            assert torch.equal(mine, other), f"{order}: {number} of {len(ours)} differs"
    sys.stdout.write("same\n")


if __name__ == "__main__":
    main()
