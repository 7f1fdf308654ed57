"""Programs whose loop does more than train: it evaluates, logs, copies, saves, leaves early."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

from experiments.programs.program import CLASSES, WIDTH, Program


def held_back(program: Program) -> tuple[Tensor, Tensor]:
    """Return samples that no step uses first."""
    points, classes = zip(*(program.data[k] for k in range(120, 136)), strict=True)
    return torch.stack(points), torch.tensor(classes)


class EvaluationInTheLoop(Program):
    """An evaluation with dropout off behind every second step."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))

    def after(self, step: Any) -> bool | None:
        if step.number % 2:
            points, classes = held_back(self)
            self.model.eval()
            with torch.inference_mode():
                self.told["right"] = float(F.cross_entropy(self.model(points), classes))
            self.model.train()
        return None


class LogOfTheFirstRank(Program):
    """A log that the first rank begins anew before the loop, and that has a line per step at the end."""

    reported = True
    without = ("resume",)  # the second life begins its log anew

    def prepared(self) -> None:
        self.log = os.path.join(os.getcwd(), "log.txt")
        if self.job is None or self.job.rank == 0:
            with open(self.log, "w") as file:
                file.write("begin\n")

    def after(self, step: Any) -> bool | None:
        if self.job is None or self.job.rank == 0:
            with open(self.log, "a") as file:
                file.write(f"{step.number}\n")
        return None

    def end(self) -> None:
        with open(self.log) as file:
            lines = file.read().split()
        self.told["lines"] = len(lines) - 1 if "1" in lines else 0

    def kept(self) -> Mapping[str, Any]:
        return {"first lines are there": self.told["lines"] > 0}


class OwnAverage(Program):
    """An average of the script's own, made by deepcopy before `prepare` and registered."""

    def build(self) -> None:
        super().build()
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def registered(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def after(self, step: Any) -> bool | None:
        for name, p in self.model.named_parameters():
            self.average[name].lerp_(p.detach(), 0.3)
        return None

    def kept(self) -> Mapping[str, Any]:
        return self.average


class StopsEarly(Program):
    """A loop that is left when the loss has not fallen for two steps, which is registered."""

    def build(self) -> None:
        super().build()
        self.best = {"loss": torch.tensor(1e9), "bad": torch.tensor(0)}

    def registered(self) -> Mapping[str, Any]:
        return {"best": self.best}

    def after(self, step: Any) -> bool | None:
        better = step.loss < float(self.best["loss"]) - 0.01
        self.best["bad"].copy_(torch.tensor(0) if better else self.best["bad"] + 1)
        self.best["loss"].copy_(torch.tensor(min(step.loss, float(self.best["loss"]))))
        return int(self.best["bad"]) >= 2

    def kept(self) -> Mapping[str, Any]:
        return self.best


class BestWeights(Program):
    """The parameters of the best step are kept as a copy and put back behind the loop."""

    def build(self) -> None:
        super().build()
        self.best = {"loss": torch.tensor(1e9), **{k: v.clone() for k, v in self.model.state_dict().items()}}

    def registered(self) -> Mapping[str, Any]:
        return {"best": self.best}

    def after(self, step: Any) -> bool | None:
        if step.loss < float(self.best["loss"]):
            self.best["loss"].copy_(torch.tensor(step.loss))
            for name, value in self.model.state_dict().items():
                self.best[name].copy_(value)
        return None

    def end(self) -> None:
        copied = super().make_model()
        copied.load_state_dict({name: value for name, value in self.best.items() if name != "loss"})
        self.told["best"] = float(copied[0].weight.detach().norm())

    def kept(self) -> Mapping[str, Any]:
        return self.best


class AsksForCheckpoints(Program):
    """Checkpoints that the loop asks for, the last of them behind its last step."""

    reported = True
    refused: Mapping[str, str] = {"one": "checkpoint", "job": "checkpoint-dir"}

    def after(self, step: Any) -> bool | None:
        if self.job is not None and os.environ.get("ELASTRAIN_CHECKPOINT_DIR") and step.number % 4 == 3:
            self.job.checkpoint()
        return None


class Nested(Program):
    """A subprocess of the script that trains by itself with elastrain."""

    reported = True
    without = ("within", "save")
    CODE = """
import torch, elastrain
job = elastrain.init(seed=0)
model = torch.nn.Linear(2, 2)
loader = elastrain.DataLoader([torch.ones(2)] * 4, global_batch_size=2, micro_batch_size=2)
model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for step in job.steps(loader, until=2):
    for batch in step:
        step.backward(model(batch).sum())
print(job.world_size)
"""

    def end(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", self.CODE], capture_output=True, text=True, timeout=60, check=False
        )
        self.told["nested"] = done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    def kept(self) -> Mapping[str, Any]:
        """Return whether it trained, or was told which variables of the environment to remove."""
        return {"nested": self.told["nested"] == "1" or "ELASTRAIN_" in self.told["nested"]}


class SeedsItself(Program):
    """A loop that seeds torch's generator in each step."""

    random = True

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Linear(16, CLASSES))

    def before(self, step: Any) -> None:
        torch.manual_seed(step.number)


class RatesByHand(Program):
    """A loop that lowers the rate when the norm of the gradient is large."""

    max_grad_norm = 0.2

    def after(self, step: Any) -> bool | None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 if step.grad_norm > 0.5 else 1e-2
        self.told["gradient"] = step.grad_norm
        return None


class Interrupted(Program):
    """A forward that is interrupted once, and computed again by the loop."""

    reported = True

    def body(self, step: Any, batch: Any) -> None:
        for attempt in range(2):
            try:
                hidden = self.model[0](batch[0])
                if attempt == 0 and step.number == 3:
                    raise KeyboardInterrupt
                step.backward(F.cross_entropy(self.model[2](self.model[1](hidden)), batch[1]))
            except KeyboardInterrupt:
                continue
            break


class LoggedNorms(Program):
    """The norm of all parameters is looked at behind each step, as logs of a run do."""

    def after(self, step: Any) -> bool | None:
        self.norm = float(torch.stack([p.detach().norm() for p in self.model.parameters()]).norm())
        return None

    def kept(self) -> Mapping[str, Any]:
        return {"norm": self.norm}


class StatisticsBehindTheLoop(Program):
    """An average of the model whose batch norms take their statistics behind the loop (SWA)."""

    def make_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(16)
        return nn.Sequential(nn.Linear(WIDTH, 16, bias=False), norm, nn.Tanh(), nn.Linear(16, CLASSES))

    def build(self) -> None:
        super().build()
        self.average = AveragedModel(self.model)

    def registered(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def after(self, step: Any) -> bool | None:
        if step.number >= 4:
            self.average.update_parameters(self.model)
        return None

    def end(self) -> None:
        update_bn([held_back(self)[0]], self.average)
        self.told["mean"] = float(self.average.module[1].running_mean.norm())

    def kept(self) -> Mapping[str, Any]:
        return {"average": self.average}


class OnMeta(Program):
    """A parameter that was never given memory: refused by name, in a job and in training within memory."""

    reported = True
    refused: Mapping[str, str] = {"job": "never", "within": "never"}

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("never", nn.Parameter(torch.empty(4, device="meta")))
        return model

    def says(self) -> Mapping[str, Any]:
        return {"loss": sum(self.losses)}


class BufferOnMeta(Program):
    """A buffer that was never given memory."""

    reported = True
    refused: Mapping[str, str] = {"job": "never", "within": "never"}

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("never", torch.empty(4, device="meta"))
        return model
