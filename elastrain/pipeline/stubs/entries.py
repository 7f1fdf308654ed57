"""Stands at the entries of a model's blocks: each block's `forward` goes through one function while it stands there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from elastrain.errors import ConfigError, CutError

_COMPILED = (
    "the whole model is compiled, and a pipeline needs the code between its blocks: compile each block instead "
    "(for block in model.layers: block.compile())"
)
_DYNAMO = str(Path("torch", "_dynamo", "eval_frame.py"))
Forward = Callable[..., Any]
Entry = Callable[[int, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""(the block's place, its own forward, arguments by place, by name) -> what the block returns."""


class Entries:
    """`forward` of each block is replaced on the module itself, so that hooks before and behind it stay as they are.

    Of a compiled block what was compiled is replaced as a whole: a compiler must not look into an entry.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], entry: Entry) -> None:
        """Raises CutError for a model that is compiled as a whole."""
        check_not_compiled(model)
        self._replaced: list[tuple[nn.Module, str, Forward | None]] = []
        for place, name in enumerate(blocks):
            module = model.get_submodule(name)
            attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
            self._replaced.append((module, attribute, module.__dict__.get(attribute)))
            setattr(module, attribute, _Way(entry, place, getattr(module, attribute)))

    def close(self) -> None:
        """Give every block its own way in back; a second call does nothing."""
        for module, attribute, own in self._replaced:
            if own is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, own)
        self._replaced = []


class _Way:
    """A stand-in for a block's forward. In a copy it leads nowhere, since it would lead into the original."""

    def __init__(self, entry: Entry, place: int, forward: Forward) -> None:
        self._entry, self._place, self._forward = entry, place, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry(self._place, self._forward, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_refuse_copy,)


def _refuse_copy(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "this model was copied in the loop of a job with --stages, and such a copy cannot compute: copy it before "
        "job.prepare(…) or behind the loop over job.steps(…)"
    )


def check_not_compiled(model: nn.Module) -> None:
    """Raises CutError for a model that is compiled as a whole: between its blocks there is no code any more."""
    # Who has compiled anything has imported this already; who has not need not wait for it.
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if is_wrapped or model._compiled_call_impl is not None:
        raise CutError(_COMPILED)


def check_caller_not_compiled() -> None:
    """Raises CutError where compiled code enters a block, as a wrapper does that `torch.compile` has returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith(_DYNAMO):
            raise CutError(_COMPILED)
        frame = frame.f_back
