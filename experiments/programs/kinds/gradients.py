"""Programs that look at gradients, change them, or differentiate in ways of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 16


class ClippedByHooks(Program):
    """Hooks that clip each parameter's gradient by value."""

    def build(self) -> None:
        super().build()
        for p in self.model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class HooksThatCount(Program):
    """Hooks behind the accumulation of gradients, which count."""

    def build(self) -> None:
        super().build()
        self.told["called"] = 0

        def count(_: Tensor) -> None:
            self.told["called"] += 1

        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(count)


class ModuleHooks(Program):
    """Hooks of modules: of the forward, which scale; of the backward, which halve what passes on."""

    def build(self) -> None:
        super().build()
        self.model[0].register_forward_hook(lambda module, inputs, output: output * 1.5)
        self.model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


class HooksOnActivations(Program):
    """A hook on a hidden tensor, which turns a gradient around where it is large."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        hidden = self.model[0](points)
        hidden.register_hook(lambda gradient: torch.where(gradient.abs() > 0.05, -gradient, gradient))
        return F.cross_entropy(self.model[2](self.model[1](hidden)), classes)


class GradientPenalty(Program):
    """A critic whose gradient at its inputs is penalised, by a double backward."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, 1))

    def loss(self, batch: Any) -> Tensor:
        points, _ = batch
        points = points.clone().requires_grad_()
        made = self.model(points)
        (slope,) = torch.autograd.grad(made.sum(), points, create_graph=True)
        return made.mean() + (slope.norm(dim=-1) - 1).pow(2).mean()


class GradientPenaltyOnWeights(Program):
    """A penalty on the gradient of the parameters, by a double backward."""

    def loss(self, batch: Any) -> Tensor:
        found = super().loss(batch)
        slopes = torch.autograd.grad(found, list(self.model.parameters()), create_graph=True)
        return found + 0.1 * sum(slope.pow(2).sum() for slope in slopes)


class InnerStep(Program):
    """A step of gradient descent inside the loss, which is differentiated too (MAML)."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        half = len(points) // 2
        named = dict(self.model.named_parameters())
        inner = F.cross_entropy(functional_call(self.model, named, (points[:half],)), classes[:half])
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(self.model, moved, (points[half:],)), classes[half:])


class GradientsPerSample(Program):
    """Norms of the gradients of single samples weight the loss (`torch.func`), which hooks on saved tensors forbid."""

    refused: Mapping[str, str] = {"save": "torch.func.grad"}

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        named = {name: p.detach() for name, p in self.model.named_parameters()}

        def of_one(values: dict[str, Tensor], point: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.model, values, (point[None],)), label[None])

        slopes = vmap(grad(of_one), (None, 0, 0))(named, points, classes)
        norms = sum(slope.flatten(1).pow(2).sum(1) for slope in slopes.values()).sqrt()
        losses = F.cross_entropy(self.model(points), classes, reduction="none")
        return (losses / (1 + norms)).mean()


class ForwardMode(Program):
    """A derivative along a direction, in forward mode, with layer normalisation inside."""

    reported = True

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        with forward_ad.dual_level():
            made = self.model(forward_ad.make_dual(points, torch.ones_like(points)))
            value, slope = forward_ad.unpack_dual(made)
            return F.cross_entropy(value, classes) + 0.01 * slope.pow(2).mean()


class TwoBackwards(Program):
    """Two losses of one forward: their sum, since a job has one backward per micro-batch."""

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        hidden = self.model[1](self.model[0](points))
        slopes = torch.autograd.grad(hidden.pow(2).mean(), self.model[0].weight, retain_graph=True)[0]
        return F.cross_entropy(self.model[2](hidden), classes) * (1 + slopes.norm().detach())


class BackwardOfItsOwn(Program):
    """A second backward of the script: refused in a job by the parameter's name."""

    refused: Mapping[str, str] = {"job": "step.backward"}

    def body(self, step: Any, batch: Any) -> None:
        (0.1 * self.loss(batch)).backward()
        super().body(step, batch)


class ReversedGradient(Program):
    """A domain classifier behind a function that turns the gradient around."""

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return -0.3 * gradient

    def make_model(self) -> nn.Module:
        parts = {
            "body": nn.Linear(WIDTH, HIDDEN),
            "classes": nn.Linear(HIDDEN, CLASSES),
            "domain": nn.Linear(HIDDEN, 2),
        }
        return nn.ModuleDict(parts)

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        hidden = torch.tanh(self.model["body"](points))
        domain = self.model["domain"](self.Reverse.apply(hidden))
        return F.cross_entropy(self.model["classes"](hidden), classes) + F.cross_entropy(domain, classes % 2)


class StraightThrough(Program):
    """Weights that are rounded in the forward, with the gradient of the unrounded ones."""

    class Rounded(nn.Linear):
        def forward(self, points: Tensor) -> Tensor:
            weight = self.weight + (torch.tanh(self.weight * 3) - self.weight).detach()
            return F.linear(points, weight, self.bias)

    def make_model(self) -> nn.Module:
        return nn.Sequential(self.Rounded(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


class CheckpointedInSegments(Program):
    """A stack that is computed again in segments."""

    def make_model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        return F.cross_entropy(checkpoint_sequential(self.model, 3, points, use_reentrant=False), classes)


class UnusedLayer(Program):
    """A layer that no forward uses, under decay."""

    def make_model(self) -> nn.Module:
        return nn.ModuleDict({"used": super().make_model(), "never": nn.Linear(4, 4)})

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.5)

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        return F.cross_entropy(self.model["used"](points), classes)

    def end(self) -> None:
        self.told["never"] = float(self.model["never"].weight.detach().norm())


class FrozenForAWhile(Program):
    """A layer that is frozen from the third to the sixth step."""

    def before(self, step: Any) -> None:
        self.model[0].requires_grad_(not 3 <= step.number <= 6)


class GradientsChangedBeforeTheUpdate(Program):
    """Noise and a mask on gradients between backward and update: a job has none there, and cannot know."""

    reported = True
    refused: Mapping[str, str] = {"job": "gradient"}

    def gradients(self) -> None:
        for number, p in enumerate(self.model.parameters()):
            p.grad = torch.full_like(p, 0.01) if p.grad is None else p.grad * (1 + 0.1 * number)


class GradientsBeforeTheForward(Program):
    """Gradients that the script sets before the first forward of a step: refused in a job."""

    reported = True
    refused: Mapping[str, str] = {"job": "gradient"}

    def before(self, step: Any) -> None:
        self.model[0].weight.grad = torch.full_like(self.model[0].weight, 0.05)


class SurgeryOfTasks(Program):
    """Gradients of two tasks, made by `torch.autograd.grad` and set by the script: refused in a job."""

    refused: Mapping[str, str] = {"job": "step.backward"}

    def body(self, step: Any, batch: Any) -> None:
        points, classes = batch
        made = self.model(points)
        parameters = list(self.model.parameters())
        one = torch.autograd.grad(F.cross_entropy(made, classes), parameters, retain_graph=True)
        two = torch.autograd.grad(made.pow(2).mean(), parameters, retain_graph=True)
        for p, a, b in zip(parameters, one, two, strict=True):
            p.grad = a + b if p.grad is None else p.grad + a + b
        step.backward(made.sum() * 0)
