"""DDP under `surviving` with tensors of the test device: a member is killed in the middle of a backward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastrain.comm.autoload import NAME
from elastrain.comm.groups.works import Work
from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.torch_backend.survival import surviving
from tests.integration.comm.test_surviving import _KILL_AT, _STEPS, _arm
from tests.integration.comm.test_torch import _batch, _digest, _model, run
from tests.support import late
from tests.support.sources import ROOT

Said = tuple[int, int, list[str]]


def train(rank: int, device: str, victim: int | None) -> Said:
    ddp = DistributedDataParallel(_model().to(device), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    for step in range(_STEPS):
        if step == _KILL_AT and rank == victim:
            _arm("backward", ddp)
        for attempt in surviving(ddp, optimizer):
            with attempt:
                optimizer.zero_grad()
                ddp(_batch(rank, step).to(device)).square().mean().backward()
    on_host = _model()
    on_host.load_state_dict({name: tensor.cpu() for name, tensor in ddp.module.state_dict().items()})
    return bootstrap.session().steps, dist.get_world_size(), _digest(on_host)


def _on_late(rank: int, victim: int | None) -> Said:
    late.install()
    late.handing_over(Work, gives=["finish"], takes=["wait"])
    torch.__future__.set_swap_module_params_on_conversion(True)
    said = train(rank, "late", victim)
    assert late.races() == []
    return said


def on_late(path: str, victim: int | None, nodes: bool) -> list[Any]:
    killed = () if victim is None else (victim,)
    return run(3, Path(path), lambda rank: _on_late(rank, victim), nodes=nodes, expect_killed=killed)


def _in_a_new_process(path: Path, victim: int | None, nodes: bool) -> list[Any]:
    """Return the replicas' answers. A process whose autograd has begun takes no further device, nor do its forks."""
    call = f"{on_late.__module__} import on_late; print(json.dumps(on_late({str(path)!r}, {victim}, {nodes})))"
    command = [sys.executable, "-c", f"import json; from {call}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    said: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [False, True], ids=["one-node", "nodes"])
@pytest.mark.parametrize("victim", [None, 0, 2])
def test_a_member_is_lost_in_a_backward_and_the_replicas_are_those_of_the_cpu(
    tmp_path: Path, victim: int | None, nodes: bool
) -> None:
    killed = () if victim is None else (victim,)
    said = _in_a_new_process(tmp_path / "late", victim, nodes)
    wanted = run(3, tmp_path / "cpu", lambda rank: train(rank, "cpu", victim), nodes=nodes, expect_killed=killed)
    left = [each for each in said if each is not None]
    assert len({repr(each) for each in left}) == 1
    assert left[0][:2] == [_STEPS, 3 - len(killed)]
    assert said == wanted


@pytest.mark.slow
def test_the_backend_is_registered_for_the_accelerator_that_torch_knows_when_a_group_is_made(tmp_path: Path) -> None:
    def body(rank: int) -> tuple[list[str], str | None, list[float]]:
        before = dist.BackendConfig(dist.Backend(NAME)).device_backend_map
        assert "late" not in before
        late.install()
        kinds = list(dist.BackendConfig(dist.Backend(NAME)).device_backend_map)
        tensor = torch.ones(3).to("late")
        dist.all_reduce(tensor)
        return kinds, dist.Backend.default_device_backend_map.get("late"), tensor.cpu().tolist()

    assert run(1, tmp_path / "store", body) == [[["cpu", "cuda", "late"], None, [1.0] * 3]]
