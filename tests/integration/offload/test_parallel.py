"""Two ranks under DDP and FSDP (1 and 2) that offload to one directory: the gradients of keeping, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm

TRAINS = """
import itertools, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint
from elastrain.offload import save_on_disk

directory, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.recomputes = recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def ddp(net):
    return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.05)


def sharded(net, policy=MixedPrecisionPolicy()):
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


def flat(net):
    return FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))


def half(net):
    return sharded(net, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def gradients(net, loss):
    loss.backward()
    found = [p.grad for p in net.parameters() if p.grad is not None]
    found = [each.to_local() if hasattr(each, "to_local") else each for each in found]
    found = [each.clone() for each in found]
    net.zero_grad()
    return found


x = torch.randn(128, 64, generator=torch.Generator().manual_seed(rank))
for wrap, recomputes in itertools.product((ddp, flat, sharded, half), (False, True)):
    net = wrap(Net(recomputes))
    expected = gradients(net, net(x).float().square().mean())
    offload = save_on_disk([directory], memory_limit=(96 if recomputes else 384) << 10, min_bytes=1024, deadline_s=20.0)
    for _ in range(3):
        with offload:
            loss = net(x).float().square().mean()
        for found, wanted in zip(gradients(net, loss), expected, strict=True):
            assert torch.equal(found, wanted), (wrap, recomputes)
    assert offload.stats().spilled_bytes > 0, (wrap, recomputes)
    del loss
    offload.close()
dist.destroy_process_group()
print("same")
"""


@pytest.mark.slow
def test_two_ranks_under_ddp_and_fsdp_keep_their_bits(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    ranks = [
        warm.Popen(
            [sys.executable, "-c", TRAINS, str(disk), str(tmp_path / "store"), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert all(each.endswith("same\n") for each in told)
    assert list(disk.iterdir()) == []
