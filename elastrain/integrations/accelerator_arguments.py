"""The arguments of an accelerator: what they choose in a job, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from elastrain.errors import ConfigError

_TAKEN = frozenset({"device_placement", "split_batches", "rng_types", "dataloader_config", "project_config"})
"""Arguments that are taken, and of which nothing follows beside the number of processes, which is 1."""
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def steps_of(steps: int, others: dict[str, Any]) -> int:
    """Return the number of batches in a step, and take the plugin that may say it out of the arguments."""
    plugin = others.pop("gradient_accumulation_plugin", None)
    return steps if plugin is None else int(plugin.num_steps)


def check(others: Mapping[str, Any], precision: str) -> None:
    """Raise ConfigError for arguments that have no meaning in a job."""
    for name, value in others.items():
        harmless = name == "kwargs_handlers" and all(_is_harmless(each) for each in value or ())
        if name not in _TAKEN and value is not None and not harmless:
            raise ConfigError(f"Accelerator({name}=…) has no meaning in a job of elastrain: leave it out")
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision is one of {', '.join(PRECISIONS)}; got {precision!r}")


def _is_harmless(handler: Any) -> bool:
    return type(handler).__name__ in ("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "ProfileKwargs")


def wanted(log_with: Any) -> Sequence[Any]:
    """Return what `log_with` names. Raises ConfigError for trackers that the job has no logger for."""
    found: list[Any] = []
    for each in log_with if isinstance(log_with, list | tuple) else [log_with] if log_with is not None else []:
        name = getattr(each, "value", each)
        if name == "all":
            found += [kind for kind in ("tensorboard", "wandb") if find_spec(kind)]
        elif isinstance(name, str) and name not in ("tensorboard", "wandb"):
            raise ConfigError(
                f"log_with={name!r} cannot go on when the member that writes is lost: choose tensorboard, wandb, or a "
                "logger with the methods of elastrain.Jsonl"
            )
        else:
            found.append(name)
    return found
