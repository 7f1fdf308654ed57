"""Models, data and optimizers of the experiment, by name, and the description of one training."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from elastrain.job.batch import DataOrder
from experiments.train_gpt import model as train_gpt
from experiments.train_gpt.model import GPTConfig
from tests.contract.late.models import GPT, Convolutions

FIRST = 2
"""Steps before this one do not count for figures: what is made in them is used again later."""
WARM = 3
"""Steps before those that are timed."""
SEED, SAMPLES, MICRO_BATCH_SIZE = 5, 200, 2
WIDE, LAYERS = 160, 48
BROAD, BROAD_LAYERS = 320, 12
"""About as many parameters, in fewer shards."""
DEEP, DEEP_LAYERS, DEEP_ROWS = 192, 12, 768
CONFIGS = {
    "rehearsal": GPTConfig(layers=3, heads=2, width=32, context=16, vocabulary=64),
    "bits": GPTConfig(layers=6, heads=8, width=512, context=256, vocabulary=8192),
    "124m": train_gpt.SIZES["124m"],
    "1b": GPTConfig(layers=18, heads=16, width=2048, context=1024, vocabulary=50304),
}
"""Models of `make test-gpu`. `bits` reaches tensor cores and split-K; `rehearsal` stands for the others on `late`."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything in which two models of the table differ."""

    shape: str = "text"
    recomputes: bool = False
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    loss_scale: str | None = None
    frozen: Sequence[str] = ()
    """Names of submodules that are not trained."""
    optimizer: str = "fused AdamW"
    run_length: int = 1
    weighted: bool = False
    """Each micro-batch counts by its number of tokens."""
    teacher: str = ""
    """A registered teacher takes part in the loss: `fixed`, or `mean` of earlier parameters."""
    config: GPTConfig | None = None
    """The shape of a model of `make test-gpu`."""
    samples: int = SAMPLES


SETUPS = {
    "gpt": Setup(),
    "gpt_sgd": Setup(optimizer="SGD"),
    "convolutions": Setup(shape="images", optimizer="SGD"),
    "bf16": Setup(dtype=torch.bfloat16),
    "fp16_scaled": Setup(autocast=torch.float16, loss_scale="dynamic"),
    "autocast": Setup(autocast=torch.bfloat16),
    "checkpointing": Setup(recomputes=True),
    "frozen": Setup(frozen=("places", "blocks.0")),
    "token_weights": Setup(weighted=True, run_length=2),
    "teacher": Setup(teacher="fixed"),
    "mean_teacher": Setup(teacher="mean"),
    "wide": Setup(shape="wide"),
    "broad": Setup(shape="broad"),
    "wide_in_one_run": Setup(shape="wide", run_length=3),
    "noisy": Setup(shape="noisy"),
    "deep": Setup(shape="deep"),
}
FOR_GPU = {
    f"{size}{name}": Setup(config=config, samples=4096, **how)
    for size, config in CONFIGS.items()
    for name, how in {"": {}, " bf16": {"dtype": torch.bfloat16}, " autocast": {"autocast": torch.bfloat16}}.items()
}
WITHOUT_STAGES = ("teacher", "mean_teacher", "wide", "broad", "wide_in_one_run", "noisy", "deep")
"""Models whose loop reads all parameters, or that draw in a backward, which are refused; and one for bytes only."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: the only argument of `train.py`, as JSON."""

    model: str = "gpt"
    device: str = "late"
    steps: int = 6
    micro_batches: int = 4
    micro_batch_size: int = MICRO_BATCH_SIZE
    run_length: int = 0
    """0: that of the setup."""
    members: int = 1
    backups: int | str = 1
    troubles: Sequence[tuple[str, int, str]] = ()
    """Member, step and what happens to it then; see `train.TROUBLES`."""
    plant: str = ""
    """Name of a bug in `plants.PLANTS`."""
    meters: bool = False
    """Count what the device is asked for, and compute no digest before the end."""
    plain: bool = False
    """A plain loop of torch without a job."""
    ddp: bool = False
    """The plain loop in DistributedDataParallel, in a group of one."""
    deterministic: bool = True
    wait_from: int = 0
    """Step from which survivors wait for newcomers after each step."""
    timed: bool = False
    """Measure the steps after the first ones, as `tests.gpu.timing` does, and compute no digests."""
    copies: bool = False
    """With `timed`: follow the copies, too."""
    seconds: float = 0.0
    """With `steps=0`: time that a plain loop's timed steps take, roughly. 0: as many steps as the training before."""
    beside: int = 1
    """Plain loops that begin their timed steps at the same time."""
    compiled: str = ""
    """Backend with which torch.compile builds the blocks (the whole model: `model` before it and a blank), or `graphs`:
    the MLP of each block replays captured graphs; `capture`: the backward is captured, which is refused."""
    saved: bool = False
    """Saved activations lie on a drive between forward and backward, by `save_on_disk` in the loop."""
    peaks: bool = False
    """Tell the most bytes that the device held in the whole process, whoever resets its peak meanwhile."""
    shared: str = ""
    """Members read each other's device memory in place: `probed` if the product's probe finds that it works, `trusted`
    without a probe, `cramped` the same with room for a part of what travels. Nothing: everything is carried."""
    pause_s: float = 0.0
    """In each micro-batch, and in the backward of each layer of `wide`: other threads have their turn meanwhile."""
    slowness: float = 1.0
    """Seconds of the device's clock for each processor second."""

    @property
    def setup(self) -> Setup:
        return SETUPS[self.model] if self.model in SETUPS else FOR_GPU[self.model]

    @property
    def order(self) -> DataOrder:
        """Return the order of the samples, for the judge."""
        size = self.micro_batches * self.micro_batch_size
        order = {"global_batch_size": size, "micro_batch_size": self.micro_batch_size, "seed": SEED}
        return DataOrder(dataset_size=self.setup.samples, **order)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Words or images, drawn by their index."""

    def __init__(self, setup: Setup) -> None:
        self._shape, self._count = setup.shape, setup.samples
        self._words, self._length = (setup.config.vocabulary, setup.config.context) if setup.config else (37, 8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        if self._shape == "images":
            return torch.randn(3, 8, 8, generator=drawn), torch.randint(5, (), generator=drawn)
        if self._shape in ("wide", "broad"):
            width = WIDE if self._shape == "wide" else BROAD
            return torch.randn(width, generator=drawn), torch.randn(width, generator=drawn)
        if self._shape == "deep":
            given, targets = torch.randn(2, DEEP_ROWS, DEEP, generator=drawn)
            return given, targets
        given, targets = torch.randint(self._words, (2, self._length), generator=drawn)
        return given, targets


class Language(train_gpt.GPT):
    """A model of `make test-gpu`, and its loss."""

    def forward(self, given: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(given).flatten(0, 1).float(), targets.flatten())


class Wide(nn.Module):
    """Many linear layers."""

    def __init__(self, backward_s: float, width: int = WIDE, layers: int = LAYERS) -> None:
        super().__init__()
        self._backward_s = backward_s
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, given: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            given = given + 0.1 * layer(given)
            given.register_hook(lambda _: time.sleep(self._backward_s))
        return (given - targets).square().mean()


class Deep(nn.Module):
    """Layers that save far more than they hold, so that a memory limit moves activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DEEP, DEEP) for _ in range(DEEP_LAYERS))

    def forward(self, given: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            given = given + F.gelu(layer(given))
        return (given - targets).square().mean()


class Noisy(GPT):
    """A model that draws on its device in the backward of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(self._with_noise)

    @staticmethod
    def _with_noise(block: nn.Module, given: object, made: Tensor) -> None:
        made.register_hook(lambda gradient: gradient + 0.1 * torch.randn_like(gradient))


class Taught(nn.Module):
    """A model and its teacher, whose loss pulls at the model's."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher

    def pulled(self, loss: Tensor, given: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(given, targets)
        return loss + 0.1 * (loss - wanted).square()

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        for mine, now in zip(self.teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(now, 0.1)


def build(training: Training) -> nn.Module:
    """Make the model on the training's device. Ties stay."""
    setup = training.setup
    if setup.config is not None:
        with torch.device(training.device if training.timed else "cpu"):
            return Language(setup.config).to(setup.dtype).to(training.device)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "text": lambda: GPT(recomputes=setup.recomputes),
        "images": Convolutions,
        "wide": lambda: Wide(training.pause_s),
        "broad": lambda: Wide(training.pause_s, BROAD, BROAD_LAYERS),
        "noisy": Noisy,
        "deep": Deep,
    }
    made = kinds[setup.shape]()
    for name in setup.frozen:
        made.get_submodule(name).requires_grad_(False)
    return made.to(setup.dtype).to(training.device)


GRAPHS = ("graphs", "capture")
"""Values of `Training.compiled` that compile nothing."""


def compile_blocks(model: Any, training: Training) -> None:
    """Compile the model or its blocks, or capture parts of them, as the training says."""
    if training.compiled == "graphs":
        config = training.setup.config
        shape = (
            (training.micro_batch_size, config.context, config.width) if config else (training.micro_batch_size, 8, 16)
        )
        for block in model.blocks:
            sample = torch.zeros(shape, device=training.device, dtype=training.setup.dtype).requires_grad_()
            torch.get_device_module(training.device).make_graphed_callables(block.mlp, (sample,))
    elif training.compiled and training.compiled not in GRAPHS:
        whole, _, backend = training.compiled.rpartition(" ")
        for module in [model] if whole else model.blocks:
            module.compile(backend=backend)


def capturing(training: Training) -> Any:
    """Return the context of each backward."""
    if training.compiled != "capture":
        return contextlib.nullcontext()
    device = torch.get_device_module(training.device)
    return device.graph(device.CUDAGraph())


def teacher_of(model: nn.Module, training: Training) -> Taught | None:
    """Make the teacher, before `prepare`."""
    return Taught(copy.deepcopy(model).requires_grad_(False)) if training.setup.teacher else None


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]


def optimizer_of(trained: Sequence[Tensor], training: Training) -> torch.optim.Optimizer:
    """Make the optimizer."""
    if training.setup.optimizer == "SGD":
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-3, fused=True)


def autocast(training: Training) -> Any:
    """Return the context of each forward."""
    dtype = training.setup.autocast
    return torch.autocast(training.device, dtype=dtype) if dtype is not None else contextlib.nullcontext()


def moved(batch: Sequence[Tensor], training: Training) -> list[Tensor]:
    """Return the batch on the device, floating-point inputs in the model's precision. The host does not wait."""
    dtype = training.setup.dtype
    batch = [each.to(dtype) if each.is_floating_point() else each for each in batch]
    return [each.to(training.device, non_blocking=True) for each in batch]
