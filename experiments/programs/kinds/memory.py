"""Programs that use memory in ways that matter where tensors leave it: late graphs, interrupts, hooks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.programs.program import CLASSES, WIDTH, Program

HIDDEN = 48


class Block(nn.Module):
    """Normalisation, and two layers beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class _Deep(Program):
    """A stack of blocks, large enough for parts of it to leave memory."""

    block: type[nn.Module] = Block

    def make_model(self) -> nn.Module:
        blocks = [self.block() for _ in range(4)]
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *blocks, nn.Linear(HIDDEN, CLASSES))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class DeepAndPlain(_Deep):
    """The stack itself, clipped."""

    max_grad_norm = 0.5


class ForwardInTheLoop(_Deep):
    """An evaluation in inference mode behind each step."""

    def after(self, step: Any) -> bool | None:
        self.model.eval()
        with torch.inference_mode():
            self.told["evaluated"] = float(self.model(torch.ones(3, WIDTH)).square().mean())
        self.model.train()
        return None


class LateGraph(_Deep):
    """A graph from before the update that is gone back through after it: refused in a job."""

    reported = True
    refused: Mapping[str, str] = {"job": "gradient"}

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("place", nn.Parameter(torch.zeros(CLASSES)))
        return model

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        return F.cross_entropy(self.model(points) + self.model.place, classes)

    def gradients(self) -> None:
        self.late = (torch.ones(CLASSES) * 0.01 + self.model.place).sum()

    def after(self, step: Any) -> bool | None:
        self.late.backward()
        return None


class Stashed(_Deep):
    """A mask that the loop leaves in the layers before each forward."""

    class Masked(Block):
        mask: Tensor | None = None

        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden * self.mask)

    block = Masked

    def loss(self, batch: Any) -> Tensor:
        mask = (torch.arange(HIDDEN) % (2 + int(batch[1][0])) > 0).float()
        for layer in self.model[1:-1]:
            layer.mask = mask
        return super().loss(batch)


class SharpnessAware(_Deep):
    """Weights that are moved, gone back through, and moved back (SAM): refused in a job."""

    refused: Mapping[str, str] = {"job": "0."}

    def body(self, step: Any, batch: Any) -> None:
        self.loss(batch).backward()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        moves = [p.grad.sign() * 1e-3 for p in parameters]
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.add_(move)
        self.optimizer.zero_grad()
        step.backward(self.loss(batch))
        with torch.no_grad():
            for p, move in zip(parameters, moves, strict=True):
                p.sub_(move)

    micro = 16


class StepsInHooks(_Deep):
    """Parameters that a hook moves as soon as their gradient is there, and that forget it: refused in a job."""

    reported = True
    refused: Mapping[str, str] = {"job": "2.up.weight"}

    def build(self) -> None:
        super().build()

        def step(p: Tensor) -> None:
            assert p.grad is not None
            with torch.no_grad():
                p.add_(p.grad, alpha=-0.01)
            p.grad = None

        self.model[2].up.weight.register_post_accumulate_grad_hook(step)


class ReplacedInHooks(_Deep):
    """A hook that puts another gradient in the accumulated one's place."""

    micro = 16

    def build(self) -> None:
        super().build()

        def replaced(p: Tensor) -> None:
            assert p.grad is not None
            p.grad = p.grad.clamp(-1e-3, 1e-3)

        self.model[2].up.weight.register_post_accumulate_grad_hook(replaced)


class InterruptedInALayer(_Deep):
    """An interrupt inside a layer's forward, after which the micro-batch is computed again."""

    reported = True

    class Stopped(Block):
        due = False

        def forward(self, hidden: Tensor) -> Tensor:
            made = super().forward(hidden)
            if InterruptedInALayer.Stopped.due:
                InterruptedInALayer.Stopped.due = False
                raise KeyboardInterrupt
            return made

    block = Stopped

    def before(self, step: Any) -> None:
        self.Stopped.due = step.number in (2, 5, 6)

    def body(self, step: Any, batch: Any) -> None:
        try:
            loss = self.loss(batch)
        except KeyboardInterrupt:
            loss = self.loss(batch)
        step.backward(loss)


class InterruptedInTheBackward(_Deep):
    """An exception in a layer's backward, after which gradients are forgotten and the micro-batch computed again."""

    reported = True
    micro = 16
    refused: Mapping[str, str] = {"job": "backward"}

    class Stop(torch.autograd.Function):
        due = False

        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if InterruptedInTheBackward.Stop.due:
                InterruptedInTheBackward.Stop.due = False
                raise InterruptedError("the drive is full")
            return gradient

    class Stopped(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(InterruptedInTheBackward.Stop.apply(hidden))

    block = Stopped

    def before(self, step: Any) -> None:
        self.Stop.due = step.number in (2, 5, 6)

    def body(self, step: Any, batch: Any) -> None:
        try:
            step.backward(self.loss(batch))
        except InterruptedError:
            self.optimizer.zero_grad()
            step.backward(self.loss(batch))


class NestedActivations(_Deep):
    """Nested tensors between layers."""

    reported = True

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        rows = torch.nested.nested_tensor([points[:1], points[1:]], layout=torch.strided)
        made = self.model[-1](F.relu(self.model[0](rows)))
        return F.cross_entropy(torch.cat(made.unbind()), classes)


class Discarded(_Deep):
    """Outputs whose memory is given back after use, and filled again in the backward (Megatron)."""

    reported = True

    class Filled(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            normed = self.norm(hidden)
            raw = torch.sin(normed.detach())
            made = _Kept.apply(normed, raw)
            out = hidden + self.down(F.gelu(self.up(made)))
            size = made.untyped_storage().nbytes()
            made.untyped_storage().resize_(0)
            kept = normed.detach().clone()

            def fill(_: Tensor) -> None:
                made.untyped_storage().resize_(size)
                made.untyped_storage().copy_(torch.sin(kept).untyped_storage())

            out.register_hook(fill)
            return out

    block = Filled


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, raw: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return raw

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        return gradient * torch.cos(hidden), None


class RelativeFolder(_Deep):
    """A loop that changes the process's folder, as launchers of experiments do."""

    reported = True
    relative = True

    def before(self, step: Any) -> None:
        if step.number in (2, 5):
            os.chdir(tempfile.gettempdir() if step.number == 2 else "/")


class SavesByHooks(_Deep):
    """Hooks on saved tensors of the script's own, which pack to half the precision and back."""

    def loss(self, batch: Any) -> Tensor:
        def packed(tensor: Tensor) -> Any:
            return tensor.bfloat16() if tensor.is_floating_point() and not tensor.requires_grad else tensor

        def opened(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, opened):
            return super().loss(batch)
