"""`resumed_training.py` where newcomers read their checkpoint from a slow place."""

import os
import sys
import time
from collections.abc import Iterator, Sequence

from torch import Tensor

from elastrain.snapshot.durable.reading import Checkpoint
from tests.integration.scripts import resumed_training

FIRST_NEWCOMER, A_SHARD_S = 3, 0.4
read_parameters = Checkpoint.read_parameters


def slowly(checkpoint: Checkpoint, shards: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What is read is what lies there; only later."""
    sys.stderr.write(f"{os.environ['ELASTRAIN_MEMBER']} reads slowly\n")
    for each in read_parameters(checkpoint, shards):
        time.sleep(A_SHARD_S)
        yield each


if __name__ == "__main__":
    if int(os.environ["ELASTRAIN_MEMBER"].removeprefix("m")) >= FIRST_NEWCOMER:
        Checkpoint.read_parameters = slowly  # type: ignore[method-assign]
    resumed_training.main()
