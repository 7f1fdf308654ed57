"""What a member of a pipeline has of a model: a line per parameter that is there, with a digest of its bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import torch
from torch import nn

from elastrain.pipeline.stubs.placeholders import AbsentParameter


def lines_of(model: nn.Module, step: int) -> Iterator[str]:
    """`step name digest` of every parameter that the script may use: not of blocks that this member does not have.

    Their memory is one NaN, or what a member that gets them soon has received so far.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, AbsentParameter):
            continue
        # A copy: blocks that a recovery has this member adopt come in while the script is here, and are NaN until then.
        with torch._C.DisableTorchFunctionSubclass():  # one that goes at this moment would be refused
            value = parameter.detach().clone(memory_format=torch.contiguous_format)
        if not bool(value.isnan().any()):
            yield f"{step} {name} {blake2b(value.view(torch.uint8).cpu().numpy(), digest_size=8).hexdigest()}\n"


def whole(lines: Iterable[str]) -> set[str]:
    """Those with all of their words: a member that was killed may have left half a line."""
    return {line for line in lines if len(line.split()) == 3 and len(line.split()[2]) == 16}
