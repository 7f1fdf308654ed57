"""A member of a torch job on a host of its own: `python -m tests.support.comm_host_member RANK WORLD STORE`.

It says a line after each thing that it was told on its standard input: `reduce` (the digest of sums of several sizes),
`fail` (how a collective ends whose members are cut off), `edit` (the same digest of ranks 0 and 1 alone).
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch
import torch.distributed as dist

import elastrain.comm
from elastrain.comm.errors import CommError
from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.wire.addresses import MeshConfig


def _digest(rank: int) -> str:
    found = hashlib.blake2b(digest_size=8)
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (100, 100_000):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
            dist.all_reduce(tensor)
            found.update(tensor.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _fail() -> str:
    began_s = time.monotonic()
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(100_000))
    except CommError as error:
        return f"{type(error).__name__} {time.monotonic() - began_s:.2f}"
    return "nothing happened"


def main() -> None:
    rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    # Of a host whose cable is cut nobody hears: the kernel's silence is all there is.
    mesh = MeshConfig(
        transport="tcp",
        bind_host=bootstrap._own_address(),
        tcp_silence_s=2,
        connect_timeout_s=60.0,  # all come, however busy the machine is
        handshake_timeout_s=60.0,
    )
    options = elastrain.comm.Options(mesh=mesh, secret=b"s" * 32)
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]  # of torch
    dist.init_process_group("elastrain", store=store, rank=rank, world_size=world, pg_options=options)
    nodes = len({peer.node for peer in bootstrap.session().peers})
    print(f"ready on {nodes}", flush=True)  # noqa: T201 - its answer
    for line in sys.stdin:
        if line == "edit\n":
            elastrain.comm.reconfigure(None, [0, 1])
        print(_fail() if line == "fail\n" else _digest(rank), flush=True)  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
