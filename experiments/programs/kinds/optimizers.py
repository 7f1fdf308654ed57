"""Programs with optimizers of their own, or of torch in less usual settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.programs.program import CLASSES, WIDTH, Program

UNKNOWN = {"within": "each element"}
"""Training within memory knows the optimizers of torch only."""
VOUCHED = {"job": "elementwise", **UNKNOWN}
"""What the sentence must name where the claim `elementwise=True` does not hold."""


class _Own(torch.optim.Optimizer):
    """An optimizer with Adam's averages. Subclasses say how they count and how they move a parameter."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), **more: Any) -> None:
        self.count = 0
        super().__init__(params, {"lr": lr, "betas": betas, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            self.count_in(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group)

    def count_in(self, group: dict[str, Any]) -> None:
        """Count a step in the group."""

    def counted(self, state: dict[str, Any], group: dict[str, Any]) -> int:
        state["count"] = state.get("count", 0) + 1
        return int(state["count"])

    def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "mean" not in state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        first, second = group["betas"]
        count = self.counted(state, group)
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean, square = state["mean"] / (1 - first**count), state["square"] / (1 - second**count)
        p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-group["lr"])


class _WithOwnOptimizer(Program):
    """A program whose optimizer is vouched for."""

    elementwise = True
    refused: Mapping[str, str] = UNKNOWN
    optimizer_class: type[_Own] = _Own

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.model.parameters())


class OwnCounter(_WithOwnOptimizer):
    """An Adam that counts in the state of each parameter."""

    reported = True


class GroupCounter(_WithOwnOptimizer):
    """An Adam that counts in its groups (apex, schedule-free, Prodigy)."""

    reported = True

    class Adam(_Own):
        def count_in(self, group: dict[str, Any]) -> None:
            group["step"] = group.get("step", 0) + 1

        def counted(self, state: dict[str, Any], group: dict[str, Any]) -> int:
            return int(group["step"])

    optimizer_class = Adam

    def end(self) -> None:
        self.told["counter"] = self.optimizer.param_groups[0].get("step")


class TwoGroupCounters(GroupCounter):
    """As with one group; the second group counts by twos."""

    reported = False

    class Adam(GroupCounter.Adam):
        def count_in(self, group: dict[str, Any]) -> None:
            group["step"] = group.get("step", 0) + group["pace"]

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": self.model[0].parameters(), "pace": 1}, {"params": self.model[2].parameters(), "pace": 2}]
        return self.Adam(groups)


class TensorCounter(GroupCounter):
    """The counter in the group is a tensor."""

    reported = False

    class Adam(GroupCounter.Adam):
        def count_in(self, group: dict[str, Any]) -> None:
            group["step"] = group.get("step", torch.zeros(())) + 1

    optimizer_class = Adam

    def end(self) -> None:
        self.told["counter"] = float(self.optimizer.param_groups[0].get("step", 0.0))


class SelfCounter(_WithOwnOptimizer):
    """An Adam that counts on itself."""

    reported = True
    refused = VOUCHED

    class Adam(_Own):
        def counted(self, state: dict[str, Any], group: dict[str, Any]) -> int:
            return self.count

    optimizer_class = Adam


class NdimDecay(_WithOwnOptimizer):
    """Weights decay, biases do not, by the number of their dimensions."""

    reported = True
    refused = VOUCHED

    class Adam(_Own):
        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if p.ndim > 1:
                p.mul_(1 - 0.5 * group["lr"])
            super().move(p, gradient, state, group)

    optimizer_class = Adam


class Lamb(_WithOwnOptimizer):
    """Each parameter's update is scaled to its norm: not elementwise, though vouched for."""

    refused = VOUCHED

    class Optimizer(_Own):
        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            before = p.clone()
            super().move(p, gradient, state, group)
            moved = p - before
            p.copy_(before + moved * (before.norm() / moved.norm().clamp_min(1e-8)) * 0.1)

    optimizer_class = Optimizer

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, CLASSES))


class CentralizedGradients(_WithOwnOptimizer):
    """Each row's mean is taken from the gradient: not elementwise, though vouched for."""

    refused = VOUCHED

    class Optimizer(_Own):
        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if gradient.ndim > 1:
                gradient = gradient - gradient.mean(1, keepdim=True)
            super().move(p, gradient, state, group)

    optimizer_class = Optimizer


class Lion(_WithOwnOptimizer):
    """The sign of an average moves parameters, and they decay."""

    class Optimizer(_Own):
        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not state:
                state["mean"] = torch.zeros_like(p)
            # Far from zero, where rounding does not decide the sign.
            p.mul_(1 - 0.1 * group["lr"]).add_(torch.tanh(1e3 * state["mean"].lerp(gradient, 0.1)), alpha=-group["lr"])
            state["mean"].lerp_(gradient, 0.01)

    optimizer_class = Optimizer


class Lookahead(_WithOwnOptimizer):
    """Slow weights in the state, to which the fast ones return every third step."""

    class Optimizer(_Own):
        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if "slow" not in state:
                state["slow"] = p.clone()
            super().move(p, gradient, state, group)
            if state["count"] % 3 == 0:
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])

    optimizer_class = Optimizer


class ScheduleFree(_WithOwnOptimizer):
    """The point where gradients are taken lies between a fast and an averaged one; the group counts."""

    class Optimizer(_Own):
        def count_in(self, group: dict[str, Any]) -> None:
            group["k"] = group.get("k", 0) + 1

        def move(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not state:
                state["z"] = p.clone()
            share = 1 / group["k"]
            averaged = (p - 0.1 * state["z"]) / 0.9
            state["z"].sub_(gradient, alpha=10 * group["lr"])
            averaged.lerp_(state["z"], share)
            p.copy_(0.9 * averaged + 0.1 * state["z"])

    optimizer_class = Optimizer

    def end(self) -> None:
        self.told["k"] = self.optimizer.param_groups[0].get("k")


class WarmingOptimizer(_WithOwnOptimizer):
    """An optimizer that changes its group's learning rate while it steps."""

    class Optimizer(_Own):
        def count_in(self, group: dict[str, Any]) -> None:
            group["lr"] = min(1e-2, group["lr"] * 1.2)

    optimizer_class = Optimizer

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.Optimizer(self.model.parameters(), lr=1e-3)

    def end(self) -> None:
        self.told["rate"] = self.optimizer.param_groups[0]["lr"]


class GroupsOfAllKinds(Program):
    """Rates, decays and betas of their own for weights, biases and the head, and a clipped gradient."""

    max_grad_norm = 0.5

    def make_optimizer(self) -> torch.optim.Optimizer:
        first, head = self.model[0], self.model[2]
        groups = [
            {"params": [first.weight], "weight_decay": 0.1},
            {"params": [first.bias, head.bias], "weight_decay": 0.0, "lr": 3e-3},
            {"params": [head.weight], "betas": (0.8, 0.95), "eps": 1e-6, "name": "head"},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


class _OfTorch(Program):
    """A model with parameters of several shapes, so that rules that look at shapes show."""

    max_grad_norm = 1.0

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, CLASSES))


class AveragedSgd(_OfTorch):
    """ASGD, which keeps its counters as tensors."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.ASGD(self.model.parameters(), lr=0.1, t0=3)


class AmsgradMaximized(_OfTorch):
    """AMSGrad on the negative loss, with `maximize`."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2, amsgrad=True, maximize=True)

    def loss(self, batch: Any) -> Tensor:
        return -super().loss(batch)


class RectifiedAdam(_OfTorch):
    """RAdam, whose rule changes after a few steps."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RAdam(self.model.parameters(), lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)


class ResilientPropagation(_OfTorch):
    """Rprop, which looks at signs only."""

    random = True  # rounding decides signs

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Rprop(self.model.parameters(), lr=1e-3)


class NesterovDecay(_OfTorch):
    """SGD with Nesterov's momentum and decay, and a rate that is a tensor."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)


class Adafactor(_OfTorch):
    """An optimizer of torch that keeps sums of rows: refused in a job."""

    refused: Mapping[str, str] = {"job": "Adafactor", "within": "Adafactor"}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.model.parameters(), lr=1e-2)


class OptimizerStepHooks(Program):
    """Hooks around the optimizer's step, which count and average a weight: refused in a job."""

    reported = True
    refused: Mapping[str, str] = {"job": "hook"}

    def build(self) -> None:
        super().build()
        self.average = self.model[0].weight.detach().clone()
        self.told |= {"before": 0, "after": 0}

        def before(*_: Any) -> None:
            self.told["before"] += 1

        def after(*_: Any) -> None:
            self.told["after"] += 1
            self.average.lerp_(self.model[0].weight.detach(), 0.1)

        self.optimizer.register_step_pre_hook(before)
        self.optimizer.register_step_post_hook(after)

    def end(self) -> None:
        self.told["average"] = float(self.average.norm())
