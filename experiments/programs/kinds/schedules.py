"""Programs with schedules: torch's, the loop's, and objects of the script."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler as of_torch

from experiments.programs.program import Program


class _Scheduled(Program):
    """A schedule that is stepped behind each step, whose rates are printed."""

    def build(self) -> None:
        super().build()
        self.scheduler = self.make_scheduler()
        self.told["rates"] = []

    def make_scheduler(self) -> Any:
        raise NotImplementedError

    def after(self, step: Any) -> bool | None:
        self.scheduler.step()
        self.told["rates"].append(float(self.optimizer.param_groups[0]["lr"]))
        return None

    def says(self) -> Mapping[str, Any]:
        """Return the last rates only: a member that joins late has not seen the first."""
        return {**super().says(), "rates": self.told["rates"][-2:]}

    def kept(self) -> Mapping[str, Any]:
        return {"rate": float(self.optimizer.param_groups[0]["lr"]), **self.counted()}

    def counted(self) -> Mapping[str, Any]:
        return {"epoch": self.scheduler.last_epoch}


class OneCycle(_Scheduled):
    """One cycle of rates and betas."""

    reported = True

    def make_scheduler(self) -> Any:
        return of_torch.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=30)


class OneCycleFrozenByGc(OneCycle):
    """As `one_cycle`; the collector is told to forget what was made before."""

    def build(self) -> None:
        super().build()
        gc.collect()
        gc.freeze()


class Plateau(_Scheduled):
    """The rate falls when the loss does not."""

    def make_scheduler(self) -> Any:
        return of_torch.ReduceLROnPlateau(self.optimizer, patience=0, threshold=0.5, factor=0.5)

    def after(self, step: Any) -> bool | None:
        self.scheduler.step(step.loss)
        self.told["rates"].append(float(self.optimizer.param_groups[0]["lr"]))
        return None


class WarmRestarts(_Scheduled):
    """Cosine rates that begin anew, stepped by parts of an epoch."""

    def make_scheduler(self) -> Any:
        return of_torch.CosineAnnealingWarmRestarts(self.optimizer, T_0=1, T_mult=2)

    def after(self, step: Any) -> bool | None:
        self.scheduler.step((step.number + 1) / 4)
        self.told["rates"].append(float(self.optimizer.param_groups[0]["lr"]))
        return None


class WarmupThenDecay(_Scheduled):
    """A warm-up, then an exponential decay, in sequence."""

    def make_scheduler(self) -> Any:
        first = of_torch.LinearLR(self.optimizer, 0.1, total_iters=4)
        return of_torch.SequentialLR(self.optimizer, [first, of_torch.ExponentialLR(self.optimizer, 0.8)], [4])


class Chained(_Scheduled):
    """Two schedules that act together."""

    def make_scheduler(self) -> Any:
        first = of_torch.ConstantLR(self.optimizer, 0.5, total_iters=3)
        return of_torch.ChainedScheduler([first, of_torch.StepLR(self.optimizer, 2, 0.9)])

    def counted(self) -> Mapping[str, Any]:
        return {}


class CyclicMomentum(_Scheduled):
    """Rates and momenta that go up and down."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def make_scheduler(self) -> Any:
        return of_torch.CyclicLR(self.optimizer, 0.01, 0.1, step_size_up=3)


class RatesByFunctions(_Scheduled):
    """A function for each group."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        first, head = self.model[0].parameters(), self.model[2].parameters()
        return torch.optim.AdamW([{"params": first}, {"params": head, "lr": 3e-3}], lr=1e-2)

    def make_scheduler(self) -> Any:
        return of_torch.LambdaLR(self.optimizer, [lambda n: 0.9**n, lambda n: min(1.0, (n + 1) / 5)])


class OwnLRScheduler(_Scheduled):
    """A subclass of `LRScheduler` with a counter of its own."""

    class Own(of_torch.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.bumps = 0
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            self.bumps += 1
            return [base * (1 + self.bumps % 3) / 2 for base in self.base_lrs]

    def make_scheduler(self) -> Any:
        return self.Own(self.optimizer)


class HandMade(_Scheduled):
    """An object that sets rates from its own counter (Noam's, of the annotated transformer)."""

    reported = True
    refused: Mapping[str, str] = {"resume": "register", "kill": "different lr of the optimizer"}

    class Noam:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.last_epoch = optimizer, 0

        def step(self) -> None:
            self.last_epoch += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 0.02 * min(self.last_epoch**-0.5, self.last_epoch * 4**-1.5)

    def make_scheduler(self) -> Any:
        return self.Noam(self.optimizer)


class HandMadeRegistered(HandMade):
    """As `hand_made`, with a state that is registered."""

    reported = False
    refused: Mapping[str, str] = {}

    class Noam(HandMade.Noam):
        def state_dict(self) -> dict[str, Any]:
            return {"last_epoch": self.last_epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.last_epoch = state["last_epoch"]

    def registered(self) -> Mapping[str, Any]:
        return {"noam": self.scheduler}


class LikeTimm(_Scheduled):
    """A schedule that is told the number of the update, as those of timm are; it has no counter."""

    class Cosine:
        def __init__(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
            self.optimizer, self.updates = optimizer, updates
            self.base = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]

        def step_update(self, number: int) -> None:
            for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
                group["lr"] = base * (1 + math.cos(math.pi * number / self.updates)) / 2

    def make_scheduler(self) -> Any:
        return self.Cosine(self.optimizer, self.steps)

    def after(self, step: Any) -> bool | None:
        self.scheduler.step_update(step.number + 1)
        self.told["rates"].append(float(self.optimizer.param_groups[0]["lr"]))
        return None

    def counted(self) -> Mapping[str, Any]:
        return {}


class DecayByTheLoop(Program):
    """The loop sets rate and decay from the number of the step."""

    def before(self, step: Any) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step.number)
            group["weight_decay"] = 0.1 * step.number

    def kept(self) -> Mapping[str, Any]:
        return {"decay": self.optimizer.param_groups[0]["weight_decay"]}
