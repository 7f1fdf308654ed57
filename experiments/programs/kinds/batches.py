"""Programs whose batches are no plain pairs of tensors."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from experiments.programs.program import CLASSES, WIDTH, Points, Program


def points_of(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the points and classes of samples as a batch of two tensors."""
    return torch.stack([point for point, _ in samples]), torch.tensor([label for _, label in samples])


class _Batched(Program):
    """A program that looks at the kind of its batches; `opened` takes points and classes out."""

    def loss(self, batch: Any) -> Tensor:
        self.told["kind"] = type(batch).__name__
        points, classes = self.opened(batch)
        return F.cross_entropy(self.model(points), classes)

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]


class DictBatch(_Batched):
    """A dict of tensors, strings, numbers and None."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return {
            "points": points,
            "classes": classes,
            "names": [f"sample {c}" for c in classes],
            "scale": 2.0,
            "no": None,
        }

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert batch["no"] is None
        assert batch["names"][0].startswith("sample")
        return batch["points"] * batch["scale"], batch["classes"]


class DefaultDictBatch(_Batched):
    """A defaultdict, whose factory the loop needs."""

    reported = True

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        batch = defaultdict(list)
        batch["points"], batch["classes"] = points_of(samples)
        return batch

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch["seen"].append(1)
        self.told["seen"] = batch["seen"]
        return batch["points"], batch["classes"]


class OrderedBatch(_Batched):
    """An OrderedDict, whose order the loop turns around."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return OrderedDict(classes=classes, points=points)

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch.move_to_end("classes")
        self.told["order"] = list(batch)
        return batch["points"], batch["classes"]


class Pair(NamedTuple):
    """A batch with names."""

    points: Tensor
    classes: Tensor


class NamedTupleBatch(_Batched):
    """A namedtuple."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        return Pair(*points_of(samples))

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.points, batch.classes


@dataclass
class Pack:
    """A batch that is a dataclass, as those of graphs are."""

    points: Tensor
    classes: Tensor
    weights: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.classes)


class DataclassBatch(_Batched):
    """A dataclass with tensors and a NumPy array."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return Pack(points, classes, np.linspace(0, 1, WIDTH, dtype=np.float32))

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.points * torch.from_numpy(batch.weights), batch.classes


class Mode(enum.Flag):
    """Kinds of a batch, which can be combined."""

    PLAIN = enum.auto()
    SCALED = enum.auto()
    SHIFTED = enum.auto()


class FlaggedBatch(_Batched):
    """A combined flag beside the tensors."""

    reported = True

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        return *points_of(samples), Mode.SCALED | Mode.SHIFTED

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        points, classes, mode = batch
        self.told["mode"] = int(mode.value)
        return points * (2 if Mode.SCALED in mode else 1) + (1 if Mode.SHIFTED in mode else 0), classes


class NestedTensorBatch(_Batched):
    """A nested tensor."""

    reported = True

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return {
            "points": torch.nested.nested_tensor([point[: 4 + n % 4] for n, point in enumerate(points)]),
            "classes": classes,
        }

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch["points"].to_padded_tensor(0.0, (len(batch["classes"]), WIDTH)), batch["classes"]


class SparseBatch(_Batched):
    """A sparse tensor, as of words that are counted."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return points.relu().to_sparse(), classes

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0].to_dense(), batch[1]


class BatchOfALibrary(_Batched):
    """A UserDict with methods, as tokenizers of transformers return."""

    class Encoding(UserDict):  # type: ignore[type-arg]
        def to(self, kind: torch.dtype) -> Any:
            return type(self)({k: v.to(kind) if v.is_floating_point() else v for k, v in self.items()})

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return BatchOfALibrary.Encoding({"points": points, "classes": classes})

    def opened(self, batch: Any) -> tuple[Tensor, Tensor]:
        batch = batch.to(torch.float32)
        return batch["points"], batch["classes"]


class RaggedBatch(Program):
    """Lists of sequences of other lengths in each micro-batch, packed for a recurrent layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, CLASSES)

        def forward(self, packed: PackedSequence) -> Tensor:
            return self.head(self.cell(packed)[1][0][0])

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        points, classes = points_of(samples)
        return [point[: 1 + int(c) + n % 5] for n, (point, c) in enumerate(zip(points, classes, strict=True))], classes

    def make_model(self) -> nn.Module:
        return self.Model()

    def loss(self, batch: Any) -> Tensor:
        sequences, classes = batch
        packed = pack_sequence([each[:, None] for each in sequences], enforce_sorted=False)
        return F.cross_entropy(self.model(packed), classes)


class PackedBatch(RaggedBatch):
    """A packed sequence that the collate function makes."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        sequences, classes = RaggedBatch.collate(samples)
        return pack_sequence([each[:, None] for each in sequences], enforce_sorted=False), classes

    def loss(self, batch: Any) -> Tensor:
        packed, classes = batch
        self.told["kind"] = type(packed).__name__
        return F.cross_entropy(self.model(packed), classes)


class Augmented(Program):
    """Samples that are drawn anew, by all generators, each time."""

    random = True

    class Data(Points):
        def __getitem__(self, index: int) -> Any:
            point, label = super().__getitem__(index)
            return point + torch.randn(WIDTH) * 0.1 + float(np.random.rand()) * 0.1, label

    data = Data()
