"""Random forwards: blocks that take and return tensors in many forms, and code between them. Drawn from a seed.

A block takes what the block before it returned, as it is or after code between them, and something older. Code between
works on the newest alone, as far as a pipeline can be cut at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.pipeline_models import WORDS

WIDTH = 16


class Masked(NamedTuple):
    hidden: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Scaled:
    hidden: Tensor
    scale: Tensor


def whole(returned: Any) -> Tensor:
    """The one tensor that goes on of what a block has returned."""
    match returned:
        case Masked():
            return returned.hidden.masked_fill(returned.mask.unsqueeze(-1), 0.1)
        case Scaled():
            return returned.hidden * torch.sigmoid(returned.scale)
        case {"hidden": hidden, "beside": beside, "n": n}:
            return hidden * beside / n  # type: ignore[no-any-return]
        case ["pair", made, [older, None]]:
            return made + 0.1 * older  # type: ignore[no-any-return]
        case ["turned", made]:
            return made.transpose(0, 1)  # type: ignore[no-any-return]
        case ["chunked", *chunks]:
            return torch.cat(chunks[::-1], -1)
        case ["indexed", made, index]:
            return made * (index > 5).unsqueeze(-1)  # type: ignore[no-any-return]
    assert isinstance(returned, Tensor)
    return returned


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.norm, self.up, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any, older: Any, tokens: Tensor, *, also: Any = None) -> Any:
        """`also`: a list in a dataclass."""
        x = whole(x) if also is None else (whole(x) + whole(also.hidden[0])) / 2
        if self.form == "again":
            return checkpoint(self._made, x, use_reentrant=False)
        if self.form == "in place":
            x = x.clone() if x.is_leaf else x
            x += 0.25
        return self._returned(self._made(x), older, tokens)

    def _made(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.dropout(torch.tanh(self.up(self.norm(x))))
        return made

    def _returned(self, made: Tensor, older: Any, tokens: Tensor) -> Any:
        match self.form:
            case "joined":
                return made + 0.5 * whole(older)
            case "pair":
                return "pair", made, [whole(older), None]
            case "masked":
                return Masked(made, tokens > 40)
            case "scaled":
                return Scaled(made, made.mean())
            case "dict":
                return {"hidden": made, "beside": torch.sigmoid(made), "n": 3}
            case "turned":
                return "turned", made.transpose(0, 1)
            case "chunked":
                return ("chunked", *made.chunk(2, -1))
            case "indexed":
                return "indexed", made, made.argmax(-1)
            case "unlearned":
                with torch.no_grad():
                    mean = whole(older).mean(-1, keepdim=True)
                return made - mean
        return made


_FORMS = (
    *("plain", "again", "in place", "joined", "pair", "masked", "scaled"),
    *("dict", "turned", "chunked", "indexed", "unlearned"),
)


def _halved(x: Tensor, tokens: Tensor) -> Tensor:
    half = x * 0.5
    half += x.detach()
    return half


_BETWEEN: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, tokens: F.dropout(x, 0.1),
    lambda x, tokens: x * (tokens.float().mean() / 30),
    lambda x, tokens: torch.where((tokens > 30).unsqueeze(-1), x, x * 0.5),
    lambda x, tokens: torch.cat([x, x], 1)[:, : x.shape[1]],
    lambda x, tokens: x.reshape(-1, WIDTH).view(x.shape),
    lambda x, tokens: F.layer_norm(x, (WIDTH,)),
    _halved,
)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One entry of a block in the forward."""

    block: int
    older: float
    between: tuple[int, ...]
    has_also: bool
    is_checkpointed: bool
    is_left_out: bool
    """Where a micro-batch's tokens are odd."""


class RandomFlow(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, words)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        count = draw.randint(3, 6)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(draw.choice(_FORMS)) for _ in range(count))
        self.layers[draw.randrange(count)].requires_grad_(draw.random() > 0.3)
        if draw.random() < 0.2:
            self.head.weight = self.embed.weight
        order = list(range(count))
        if draw.random() < 0.15:
            order.insert(draw.randrange(count + 1), draw.randrange(count))
        has_ways = draw.random() < 0.2
        self.entries = [
            _Entry(
                block=block,
                older=draw.random(),
                between=tuple(draw.randrange(len(_BETWEEN)) for _ in range(draw.choice([0, 0, 1, 2]))),
                has_also=draw.random() < 0.2,
                is_checkpointed=draw.random() < 0.12,
                is_left_out=has_ways and draw.random() < 0.3,
            )
            for block in order
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        returned = [self.embed(tokens)]
        is_odd = bool(tokens.sum() % 2)
        for entry in self.entries:
            x = returned[-1]
            for place in entry.between:
                x = _BETWEEN[place](whole(x), tokens)
            older = returned[int(entry.older * len(returned))]
            if not (entry.is_left_out and is_odd):
                x = self._entered(entry, x, older, tokens)
            returned.append(x)
        logits: Tensor = self.head(whole(returned[-1]))
        return logits

    def _entered(self, entry: _Entry, x: Any, older: Any, tokens: Tensor) -> Any:
        block = self.layers[entry.block]
        if entry.has_also:
            return block(x, older, tokens, also=Scaled([older], None))  # type: ignore[arg-type]
        if entry.is_checkpointed and block.form != "in place":
            return checkpoint(block, x, older, tokens, use_reentrant=False)
        return block(x, older, tokens)
