"""`python -m experiments.lifetimes.device`: the same on a CUDA device, judged by its allocator. One line of JSON each.

Ways take turns, each in a process of its own. A way's memory is the allocator's peak over all steps, its time the
median of the last ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from elastrain.offload.drives.device import Device
from elastrain.offload.drives.port import IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.lifetimes.pieces.cuda import CudaMeter, host_tier
from elastrain.offload.lifetimes.within import TrainingWithin, within
from experiments.lifetimes.worker import POLICIES, computed_again, end_step
from experiments.offload.device import measure_disk
from experiments.offload.models import Shape, build
from tests.support.faulty_engines import ThrottledEngine

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DeviceCase:
    """`way` is "plain" or a policy; `host_bytes` of host memory are above the drive, if there is one.

    All ways compute blocks again.
    """

    way: str
    kind: str = "gpt"
    width: int = 3072
    layers: int = 8
    tokens: int = 1024
    batch: int = 8
    limit_bytes: int = 0
    host_bytes: int = 0
    drive: bool = True
    bytes_per_s: float | None = None
    """Slows the drive down to that."""
    steps: int = 10
    """A plan is made after two and again after four; three more are looked at closely, point by point."""
    recompute: bool = True


@contextmanager
def highest_peak() -> Iterator[Callable[[], int]]:
    """What it yields tells the bytes that tensors took at most since then, though meters begin anew at each point."""
    seen: list[int] = []
    forget = CudaMeter.forget_peak

    def noting(meter: CudaMeter) -> None:
        seen.append(torch.cuda.max_memory_allocated())
        forget(meter)

    torch.cuda.reset_peak_memory_stats()
    with patch.object(CudaMeter, "forget_peak", noting):
        yield lambda: max([torch.cuda.max_memory_allocated(), *seen])


def train(case: DeviceCase) -> dict[str, Any]:
    """All of it, in this process."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs all ways time, and no bit depends on it
    with torch.device("cuda"):
        model, _ = build(
            case.kind, Shape(width=case.width, layers=case.layers, tokens=case.tokens, batch=case.batch, heads=32)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    training: TrainingWithin | None = None
    with tempfile.TemporaryDirectory() as folder:
        if case.way != "plain":
            engines: list[IoEngine | Device] = [_drive(case, folder)] if case.drive else []
            engines += [host_tier(case.host_bytes)] if case.host_bytes else []
            training = within(
                model,
                optimizer,
                dirs=[folder],
                memory_limit=case.limit_bytes,
                engines=engines,
                policy=POLICIES[case.way],
            )
        _note("the model is there")
        found = _steps(case, model, optimizer, training)
        if training is not None:
            with training.whole():
                found["digest"] = _digest(model, optimizer)
            found.update(reason=training.reason, **training.figures())
            training.close()
        else:
            found["digest"] = _digest(model, optimizer)
    return found


def _drive(case: DeviceCase, folder: str) -> IoEngine:
    drive = PosixEngine(folder)
    return drive if case.bytes_per_s is None else ThrottledEngine(drive, bytes_per_s=case.bytes_per_s)


def _steps(
    case: DeviceCase, model: nn.Module, optimizer: torch.optim.Optimizer, training: TrainingWithin | None
) -> dict[str, Any]:
    with highest_peak() as peak_bytes:
        seconds = [_step(case, model, optimizer, training, step) for step in range(case.steps)]
        return {
            "step_s": statistics.median(seconds[-3:]),
            "seconds": [round(each, 3) for each in seconds],
            "peak_bytes": peak_bytes(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }


def _step(
    case: DeviceCase, model: nn.Module, optimizer: torch.optim.Optimizer, training: TrainingWithin | None, step: int
) -> float:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 1024, (case.batch, case.tokens), generator=generator).cuda()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    loss = model(tokens, computed_again) if case.recompute else model(tokens)
    loss.backward()
    end_step(model, optimizer, training)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    _note(f"step {step}: {took_s:.3f} s")
    return took_s


def _note(what: str) -> None:
    """For whoever wonders why a way takes so long."""
    print(f"{time.process_time():.1f} s of processor time: {what}", file=sys.stderr, flush=True)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for each in (parameter, *(value for value in state.values() if isinstance(value, Tensor))):
            words = each.detach().contiguous().view(-1).view(torch.uint8)
            found.update(words.cpu().numpy().tobytes() if words.numel() < 4096 else _sum(words))
    return found.hexdigest()[:16]


def _sum(words: Tensor) -> bytes:
    """A sum that depends on each element's place, taken where the tensor is: a copy to the host would take longer."""
    numbers = words.view(torch.int32).to(torch.int64)
    places = torch.arange(1, numbers.numel() + 1, device=numbers.device, dtype=torch.int64)
    return int((numbers * places).sum().item()).to_bytes(8, "little", signed=True)


def in_a_process(case: DeviceCase, timeout_s: float) -> dict[str, Any]:
    """One way, in a process of its own; an error is a figure, too."""
    # Large pieces come and go: an allocator that can move the ends of segments keeps few holes. For all ways.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "experiments.lifetimes.device", "--case", json.dumps(asdict(case))]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode().strip().splitlines()
        return {"error": f"not done within {timeout_s} s", "said": said[-12:]}
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {"error": "\n".join(ran.stderr.strip().splitlines()[-4:])}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Plain, then each way at each limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case")
    parser.add_argument("--base", default="{}", help="fields of DeviceCase for all ways, as JSON")
    parser.add_argument("--ways", default="ours:0.5,ours:0.25,ours+host:0.5,ours+host:0.25,zero:0.25,demand:0.25")
    parser.add_argument("--host", type=float, default=16, help="GiB of host memory for +host; +alone has no drive")
    parser.add_argument("--timeout", type=float, default=120)
    given = parser.parse_args(arguments)
    if given.case is not None:
        print(json.dumps(train(DeviceCase(**json.loads(given.case)))))
        return
    drive = measure_disk(Path(tempfile.gettempdir()), 2 * GIB)
    _tell({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "drive": drive})
    base = json.loads(given.base)
    plain = in_a_process(DeviceCase(way="plain", **base), given.timeout)
    _tell({"way": "plain", **base, **plain})
    for each in given.ways.split(","):
        way, share = each.split(":")
        name, _, host = way.partition("+")
        limit_bytes = int(float(share) * plain["peak_bytes"])
        host_bytes = int(given.host * GIB) if host else 0
        case = DeviceCase(way=name, limit_bytes=limit_bytes, host_bytes=host_bytes, drive=host != "alone", **base)
        found = in_a_process(case, given.timeout)
        more = {}
        if "step_s" in found:
            more = {
                "bits_equal": found["digest"] == plain["digest"],
                "ideal": round(plain["step_s"] / found["step_s"], 3),
                "peak_to_limit": round(found["peak_bytes"] / limit_bytes, 3),
            }
        _tell({"way": way, "limit": float(share), **more, **found})


def _tell(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
