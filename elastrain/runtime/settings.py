"""The values that the user passed to `init`: their checks, the shape of the job, and what members compare on joining.

No state, no I/O.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elastrain.base.environment import AUTO, standing_shadows, told_to_libraries
from elastrain.device import VARIABLES, DevicePort, device_of, switches
from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.job.scaling import UNSCALED, LossScale
from elastrain.job.values import AuditPlan, Pipelining, Shape, ShardShape
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.model import compiler_choices
from elastrain.runtime.model.kernels import kernel_digests
from elastrain.version import __version__

_COMPARED = ("deterministic", "cross_check_every", "audit", "stages", "seed", "run_length", "backups")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a job, as documented at `elastrain.init`. Raises ConfigError on bad values."""

    seed: int
    run_length: int
    backups: int | str
    loss_scale: LossScale
    deterministic: bool
    cross_check_every: int = 0
    audit: int | str = 0
    stages: int | str = 1
    """Members per pipeline; AUTO: as few as have room in memory."""

    def __post_init__(self) -> None:
        if not _is_whole(self.seed, 0):
            raise ConfigError(f"seed must be a whole number from 0 on; got {self.seed!r}")
        if not _is_whole(self.run_length, 1):
            raise ConfigError(f"run_length must be a whole number from 1 on; got {self.run_length!r}")
        if self.backups != "all" and not _is_whole(self.backups, 0):
            raise ConfigError(f"backups must be a whole number from 0 on, or 'all'; got {self.backups!r}")
        if not isinstance(self.deterministic, bool):
            raise ConfigError(f"deterministic must be True or False; got {self.deterministic!r}")
        if not _is_whole(self.cross_check_every, 0):
            raise ConfigError(f"cross_check_every must be a whole number from 0 on; got {self.cross_check_every!r}")
        if self.audit != "all" and not _is_whole(self.audit, 0):
            raise ConfigError(f"audit must be a whole number from 0 on, or 'all'; got {self.audit!r}")
        if self.audit and not self.deterministic:
            raise ConfigError("audits compare gradients to the bit: they need deterministic=True")
        if self.stages != AUTO and not _is_whole(self.stages, 1):
            raise ConfigError(f"stages must be a whole number from 1 on, or 'auto'; got {self.stages!r}")
        if self.is_pipelined and (self.audit or self.cross_check_every):
            raise ConfigError(
                f"with --stages {self.stages} no member computes a whole micro-batch that another could compare: leave "
                "job.audit(…) and cross_check_every out, or use one stage"
            )

    @property
    def is_pipelined(self) -> bool:
        """True if members compute in pipelines. With AUTO these may have one member each."""
        return self.stages != 1

    @property
    def least_stages(self) -> int:
        """Members per pipeline at the least."""
        return 1 if self.stages == AUTO else int(self.stages)

    def check(self, layout: Layout) -> None:
        """Raise ConfigError if these settings do not suit the model."""
        half = next((spec.name for spec in layout.parameters if spec.dtype == "float16" and spec.trained), None)
        if half is not None and self.loss_scale == UNSCALED:
            raise ConfigError(
                f"parameter {half!r} is float16, whose gradients vanish without loss scaling: "
                "use elastrain.init(loss_scale='dynamic'), or bfloat16"
            )

    def check_registered(self, model: nn.Module, registered: Mapping[str, Any]) -> None:
        """Raise ConfigError if the script keeps an average of a model of which no member has all parameters."""
        shapes = [each.shape for each in model.parameters()]
        for name, thing in registered.items() if self.is_pipelined else ():
            if isinstance(thing, nn.Module) and [each.shape for each in thing.parameters()] == shapes:
                raise ConfigError(
                    f"{name!r} is registered and has the parameters of the model, as an average of them has: with "
                    f"--stages {self.stages} no member has the whole model between two steps; leave it out, or use one "
                    "stage"
                )

    def check_threads(self, started_with: int, device: torch.device) -> None:
        """Raise ConfigError if the script changed the thread count in its loop although the bits depend on it.

        They do where the CPU computes them.
        """
        threads = torch.get_num_threads()
        if self.deterministic and device.type == "cpu" and threads != started_with:
            raise ConfigError(
                f"the job began with {started_with} intra-op threads and this step begins with {threads}, but the bits "
                "of gradients depend on their number: call torch.set_num_threads() before job.steps(), or use "
                "elastrain.init(deterministic=False)"
            )

    def shape(self, layout: Layout, lanes: Sequence[tuple[int, ...]], micro_batches: int) -> Shape:
        """Return the shape of the job. `lanes`: the blocks of each shard's lanes; see `ModelState.lanes`."""
        shards = tuple(
            ShardShape(size_bytes=shard.numel * getattr(torch, shard.master_dtype).itemsize, lanes=blocks)
            for shard, blocks in zip(layout.shards, lanes, strict=True)
        )
        return Shape(
            runs=-(-micro_batches // self.run_length),
            blocks=len(layout.blocks),
            shards=shards,
            backups=1 << 20 if self.backups == "all" else int(self.backups),
            loss_scale=self.loss_scale,
            deterministic=self.deterministic,
            cross_check_every=self.cross_check_every,
            audit=self.audit_plan,
            block_names=tuple(layout.blocks),
            pipelining=self._pipelining(micro_batches),
        )

    def _pipelining(self, micro_batches: int) -> Pipelining | None:
        if not self.is_pipelined:
            return None
        return Pipelining(
            stages=0 if self.stages == AUTO else self.least_stages,
            micro_batches=micro_batches,
            run_length=self.run_length,
            has_standing=standing_shadows(),
        )

    @property
    def audit_plan(self) -> AuditPlan:
        """The plan that says which runs of which steps are audited."""
        every = 1 if self.audit == "all" else int(self.audit)
        return AuditPlan(every=every, is_of_all=self.audit == "all", seed=self.seed)

    def describe(
        self,
        layout: Layout,
        loader: DataLoader,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        device: torch.device,
    ) -> dict[str, Any]:
        """Return everything that decides the bits. Members compare it when they join, and it must be equal on all."""
        port = device_of(device)
        machine, exact = _of_cpu() if port.is_host else _of_accelerator(port)
        if self.deterministic:
            _check_algorithms(exact)
            machine |= compiler_choices.described()
            machine |= exact | {"deterministic algorithms": torch.are_deterministic_algorithms_enabled()}
            # Because of these names, members compare them after the entries above, which may explain a difference.
            result = "result of a fixed" if port.is_host else "device's result of a fixed"
            machine |= {f"{result} {name}": value for name, value in kernel_digests(device).items()}
        return {
            "elastrain": __version__,
            "torch": str(torch.__version__),  # not a plain str, and the codecs refuse its class
            "Python": platform.python_version(),
            "NumPy": np.__version__,
            "hash of a word": hash("elastrain"),
            **{name: getattr(self, name) for name in _COMPARED},
            "device": device.type,
            **machine,
            "model": layout.digest(),
            "optimizer": type(optimizer).__name__,
            "max_grad_norm": max_grad_norm,
            "loss_scale": str(self.loss_scale),
            **loader.described(),
        }


def stages_of(of_script: int | str | None, of_launcher: int | str | None) -> int | str:
    """Return the stages that `init` or the command line gave, else 1. Raises ConfigError if they differ."""
    said = [each for each in (of_launcher, of_script) if each is not None]
    if len(set(said)) > 1:
        raise ConfigError(
            f"elastrain run --stages {of_launcher} and init(stages={of_script!r}) ask for different pipelines: leave "
            "one of them out"
        )
    return said[0] if said else 1


def _of_cpu() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what decides the bits of an elementwise update on the CPU, and what else decides those of gradients."""
    return (
        {"CPU capability": torch.backends.cpu.get_cpu_capability()},
        {"intra-op threads": torch.get_num_threads(), "CPU model": _cpu_model()},
    )


def _of_accelerator(port: DevicePort) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same for an accelerator. Its driver decides no bits, and its processors may be of any kind."""
    found = port.describe()
    return (
        {"device capability": found.capability, "device runtime": found.runtime},
        {
            "device name": found.name,
            "device multiprocessors": found.multiprocessors,
            "device partition": found.partition,
            "device cuDNN": found.cudnn,
            "device Triton": found.triton,
            **switches(),
            **told_to_libraries(VARIABLES),
        },
    )


def _check_algorithms(exact: Mapping[str, Any]) -> None:
    """Raise ConfigError if cuDNN chooses its kernels by time."""
    if exact.get("device cuDNN") and exact["torch.backends.cudnn.benchmark"] == str(True):
        raise ConfigError(
            "torch.backends.cudnn.benchmark is True, so cuDNN chooses kernels by the time that they take, and members "
            "compute other bits: set it to False, or use elastrain.init(deterministic=False)"
        )


def _cpu_model() -> str:
    """Return the kernel's name of the CPU model, or "" if the kernel does not give one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
