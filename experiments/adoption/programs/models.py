"""Models and data of the five programs, in place of downloads.

Every forward of a model in training waits while the file `hold` is in the working directory, so that newcomers find
something left to join. Every forward in an evaluation leaves a byte in `forwards/`, by which an experiment sees who
evaluates what.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

HOLD_S, EVALUATION_S = 1.5, 0.01


def watched(kind: Any) -> Any:
    forward = kind.forward

    @functools.wraps(forward)
    def watched_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training and os.path.exists("hold"):
            time.sleep(HOLD_S)
        elif not self.training and os.path.isdir("forwards"):
            time.sleep(EVALUATION_S)
            with open(f"forwards/{os.getpid()}", "ab") as file:
                file.write(b".")
        return forward(self, *args, **kwargs)

    kind.forward = watched_forward
    return kind


@watched
class GPT(nn.Module):
    """A GPT like nanoGPT's: its embeddings are tied, and its forward returns logits and loss."""

    def __init__(self, *, vocab_size: int, block_size: int, n_embd: int, n_layer: int, n_head: int, dropout: float):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        kind = functools.partial(nn.TransformerEncoderLayer, n_embd, n_head, 4 * n_embd, dropout, F.gelu)
        self.blocks = nn.ModuleList(kind(batch_first=True, norm_first=True) for _ in range(n_layer))
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        logits = self.head(self.norm(hidden))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


@watched
class ConvNet(nn.Module):
    def __init__(self, classes: int = 8):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.classify = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 4, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


class Pictures(Dataset[tuple[Tensor, int]]):
    """Noisy pictures of a bar, and the place of the bar."""

    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.places = torch.randint(8, (count,), generator=draw)
        self.pictures = torch.randn(count, 1, 8, 8, generator=draw)
        self.pictures[torch.arange(count), 0, self.places] += 1.5

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pictures[index], int(self.places[index])


class Pairs(Dataset[dict[str, Tensor]]):
    """Pairs of sentences as token numbers, and whether the second one has the first one's first word."""

    def __init__(self, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(4, 60, (count, 16), generator=draw)
        self.labels = torch.randint(2, (count,), generator=draw)
        self.words[:, 8] = torch.where(self.labels == 1, self.words[:, 0], self.words[:, 8])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def write_text(folder: Path) -> None:
    """Write the token files of nanoGPT's `prepare.py`."""
    data = np.frombuffer(b"the job goes on, whichever worker is lost; " * 300, dtype=np.uint8).astype(np.uint16)
    data[:-2000].tofile(folder / "train.bin")
    data[-2000:].tofile(folder / "val.bin")


def bert() -> nn.Module:
    """Return a small BERT that classifies pairs of sentences."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    kind: Any = watched(
        type("Bert", (BertForSequenceClassification,), {"forward": BertForSequenceClassification.forward})
    )
    model: nn.Module = kind(BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=2, **sizes))
    return model
