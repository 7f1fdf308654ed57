"""One member of another number of members: reads its share of a checkpoint's shards when it is told to."""

from __future__ import annotations

import sys

import torch

from elastrain.snapshot.digest import digest
from elastrain.snapshot.durable import tensor_sections
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.reading import Checkpoint


def main() -> None:
    location, name, member, members = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    assert tensor_sections  # a worker that resumes has imported it, and made the digest's weights
    digest(torch.zeros(1 << 20))
    print("ready", flush=True)
    sys.stdin.readline()
    checkpoint = Checkpoint.open([place_at(location)], name)
    mine = range(member, len(checkpoint.manifest.shards), members)
    states = list(checkpoint.read_shards(mine))
    print(sum(state.nbytes for state in states), flush=True)


if __name__ == "__main__":
    main()
