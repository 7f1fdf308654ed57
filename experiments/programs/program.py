"""The form of a program: what it trains, what its loop does, and what it says of itself at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

PROGRAMS: dict[str, type[Program]] = {}
"""Name -> class. The name is that of the class in small letters."""
CLASSES = 4
WIDTH = 8


class Points(torch.utils.data.Dataset[Any]):
    """Vectors with a class each. A sample is a function of its index."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        own = torch.Generator().manual_seed(index)
        point = torch.randn(WIDTH, generator=own)
        return point, int(point[:CLASSES].argmax())


class Program:
    """A training program. Subclasses are registered under their names, unless these begin with an underscore.

    The loops of `worlds.py` call `build` once, then per step `before`, `body` for each micro-batch, and `after`; `end`
    and `says` come behind the loop.
    """

    steps: ClassVar[int] = 10
    whole: ClassVar[int] = 16
    """Samples of a step."""
    micro: ClassVar[int] = 4
    max_grad_norm: ClassVar[float | None] = None
    elementwise: ClassVar[bool] = False
    reported: ClassVar[bool] = False
    """Whether a public report of another system is behind it. The others are neighbours of such."""
    random: ClassVar[bool] = False
    """Whether losses depend on what is drawn: a job draws other numbers than a plain loop, so they are not compared."""
    refused: ClassVar[Mapping[str, str]] = {}
    """World (`job`, `within`, `save`, or the name of a way) -> a part of the sentence with which it may be refused."""
    relative: ClassVar[bool] = False
    """Whether the directory of offloading is told as a path from the present folder."""
    without: ClassVar[tuple[str, ...]] = ()
    """Ways that the program itself cannot go."""
    data: ClassVar[Any] = Points()
    collate: ClassVar[Callable[[list[Any]], Any] | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__name__.startswith("_"):
            PROGRAMS[name_of(cls)] = cls

    def __init__(self) -> None:
        self.job: Any = None
        """What `elastrain.init` returned; None in a plain loop."""
        self.losses: list[float] = []
        self.told: dict[str, Any] = {}
        """More of what `says` returns."""

    # What a program is made of.

    def build(self) -> None:
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def registered(self) -> Mapping[str, Any]:
        """What a job is told by `job.register`."""
        return {}

    def prepared(self) -> None:
        """Run what stands between `prepare` and the loop."""

    # What its loop does.

    def before(self, step: Any) -> None:
        """Run the body of the loop before `for batch in step`."""

    def body(self, step: Any, batch: Any) -> None:
        """Compute one micro-batch."""
        step.backward(self.loss(batch))

    def loss(self, batch: Any) -> Tensor:
        points, classes = batch
        return nn.functional.cross_entropy(self.model(points), classes)

    def gradients(self) -> None:
        """Change gradients between the last backward and the update."""

    def after(self, step: Any) -> bool | None:
        """Run the body of the loop after `for batch in step`. Returns True to leave the loop."""
        return None

    def end(self) -> None:
        """Run what stands behind the loop."""

    # What it says.

    def says(self) -> Mapping[str, Any]:
        """Return figures that plain PyTorch and a job of one must agree upon: numbers to 1e-4, all else exactly."""
        norms = [p.detach().double().norm() for p in self.model.parameters()]
        compared = {"loss": sum(self.losses) / max(1, len(self.losses)), "norm": float(torch.stack(norms).norm())}
        return {**({} if self.random else compared), "steps": len(self.losses), **self.told}

    def kept(self) -> Mapping[str, Any]:
        """Return what else has to be equal on all members and in all ways: tensors, modules or numbers, by name."""
        return {}


def name_of(kind: type[Program]) -> str:
    """Return the class's name in small letters with underscores."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
