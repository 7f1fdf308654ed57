"""What makes the written parts a checkpoint: copies of a shard that differ make none."""

from __future__ import annotations

import msgspec
import pytest
import torch

from elastrain.job.layout import ParameterSpec, cut
from elastrain.job.values import Contribution, Record
from elastrain.runtime.durable.manifests import Begin, Described
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import Manifest, Part
from elastrain.snapshot.durable.writing import Written

BEGIN = Begin(job="job", life=1, time_s=0.0, spec={}, hyper=[{}], changes=())
RECORD = Record(step=3, generation=1, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False)


def _part(file: str) -> Part:
    return Part(file=file, offset_bytes=0, size_bytes=64, tail_bytes=48, tail_checksum=0, plain_bytes=16)


def manifest(*digests: int) -> Manifest:
    """Of a shard of which so many members have written a copy."""
    model = torch.nn.Linear(4, 1, bias=False)
    spec = ParameterSpec(name="weight", block="b", shape=(1, 4), dtype="float32", group=0, requires_grad=True)
    layout = cut([spec], blocks=["b"], shard_numel=128)
    told = [
        Written(shard=0, version=3, digest=digest, part=_part(f"part-m{number}"))
        for number, digest in enumerate(digests)
    ]
    described = Described(layout, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return described.manifest(BEGIN, RECORD, [msgspec.json.encode(each).decode() for each in told], {})


def test_copies_that_are_equal_stand_in_for_each_other() -> None:
    (shard,) = manifest(7, 7).shards
    assert shard.digest == 7 and [part.file for part in shard.parts] == ["part-m0", "part-m1"]


def test_copies_that_differ_are_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="the copies of shard 0 in part-m0 and part-m1 and part-m2 differ"):
        manifest(7, 7, 8)
