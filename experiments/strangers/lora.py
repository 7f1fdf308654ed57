"""LoRA adapters of `peft` on a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import peft
from torch import nn


def with_lora(model: nn.Module, targets: Sequence[str]) -> nn.Module:
    """Return the model with a small adapter, which alone is trained, on each target."""
    adapted: nn.Module = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.1, fan_in_fan_out=True),
    )
    return adapted
