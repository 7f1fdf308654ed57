"""Offload against keeping, recomputing, `save_on_cpu` and plain `torch.save`: one run, one JSON. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from elastrain.offload import ActivationOffload, LimitTooSmallError, OffloadConfig, save_on_disk
from elastrain.offload.buffers import lease
from elastrain.offload.engines.posix import PosixEngine
from elastrain.offload.faults import ThrottledEngine
from elastrain.offload.hooks import MIN_BYTES
from experiments.offload.memory import Account, give_freed_memory_back, peak_rss_bytes
from experiments.offload.models import KINDS, Model, Shape, build, plainly
from experiments.offload.variants import make, step

REACH = {"peak_ratio": 0.40, "time_ratio": 1.03, "vs_recompute": 0.80, "vs_coarse": 1.5, "gain": 1.1}
LIMIT_SHARE = 0.38  # of what keeping everything needs at its peak
GAIN_LIMIT_SHARE = 0.6
RSS_NOISE = 1.05
CURVE_GB_PER_S = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to run."""

    shape: Shape
    rounds: int
    curve_rounds: int
    dtypes: tuple[torch.dtype, ...]
    gain_shape: Shape
    gain_rounds: int
    disk_bytes: int


QUICK = Size(
    shape=Shape(width=192, layers=4, tokens=256, batch=8),
    rounds=3,
    curve_rounds=1,
    dtypes=(torch.float32, torch.bfloat16),
    gain_shape=Shape(width=256, layers=8, tokens=128, batch=1),
    gain_rounds=3,
    disk_bytes=256 << 20,
)
FULL = Size(
    shape=Shape(width=256, layers=16, tokens=256, batch=16),
    rounds=3,
    curve_rounds=3,
    dtypes=(torch.float32, torch.bfloat16, torch.float64),
    gain_shape=Shape(width=384, layers=16, tokens=128, batch=1),
    gain_rounds=5,
    disk_bytes=1 << 30,
)


def gradients(model: Model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def zero(model: Model) -> None:
    """Zero, but kept: gradients are no activations and must not count as such."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()


def timed(model: Model, run: Callable[[], None]) -> float:
    zero(model)
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def processor_time(model: Model, run: Callable[[], None]) -> float:
    """Seconds of processor that the training thread itself took: says something on a busy machine too."""
    zero(model)
    began_s = time.thread_time()
    run()
    return time.thread_time() - began_s


def keep_account_bytes(model: Model, tokens: torch.Tensor) -> int:
    account = Account(list(model.parameters()), MIN_BYTES)
    zero(model)
    step(model, tokens, plainly, account.around())
    return account.peak_bytes


def same_bits(model: Model, tokens: torch.Tensor, offload: ActivationOffload) -> bool:
    zero(model)
    step(model, tokens, plainly, _nothing())
    expected = gradients(model)
    for _ in range(3):
        zero(model)
        step(model, tokens, plainly, offload)
        if not all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True)):
            return False
    return True


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def measure_model(kind: str, size: Size, directory: Path) -> dict[str, Any]:
    """Times are medians over rounds in which the variants take turns; ratios are made within a round."""
    model, tokens = build(kind, size.shape)
    account_bytes = keep_account_bytes(model, tokens)
    offload = save_on_disk([directory], memory_limit=int(LIMIT_SHARE * account_bytes))
    bits = same_bits(model, tokens, offload)
    variants = make(model, tokens, offload=offload, directory=directory)
    rounds, processor = [], []
    for _ in range(size.rounds):
        rounds.append({name: timed(model, run) for name, run in variants.items()})
        processor.append({name: processor_time(model, variants[name]) for name in ("keep", "ours", "recompute")})
    rss_bytes = {}
    for name, run in variants.items():
        zero(model)
        rss_bytes[name] = peak_rss_bytes(run)
    stats = offload.stats()
    offload.close()

    def ratio(above: str, below: str) -> float:
        return statistics.median(each[above] / each[below] for each in rounds)

    return {
        "activation_bytes": account_bytes,
        "bits_equal": bits,
        "peak_ratio": stats.peak_bytes / account_bytes,
        "peak_ratio_rss": rss_bytes["ours"] / rss_bytes["keep"],
        "rss_over_account": {
            "keep": rss_bytes["keep"] / account_bytes,
            "ours": rss_bytes["ours"] / stats.peak_bytes,
        },
        "time_ratio": ratio("ours", "keep"),
        "vs_recompute": ratio("ours", "recompute"),
        "vs_coarse": ratio("torch_save", "ours"),
        "vs_save_on_cpu": ratio("save_on_cpu", "ours"),
        "thread_time_ratio": statistics.median(each["ours"] / each["keep"] for each in processor),
        "thread_time_vs_recompute": statistics.median(each["ours"] / each["recompute"] for each in processor),
        "seconds": {name: statistics.median(each[name] for each in rounds) for name in variants},
        "rss_bytes": rss_bytes,
        "spilled_share": 0.0 if stats.last is None else stats.last.spilled_bytes / stats.last.saved_bytes,
        "stall_s_per_step": (stats.save_stall_s + stats.need_stall_s) / stats.passes,
    }


def measure_bits(size: Size, directory: Path) -> dict[str, bool]:
    """Small models, every dtype and option."""
    shape = replace(size.shape, layers=2, batch=2)
    found = {}
    for kind in KINDS:
        for dtype in size.dtypes:
            for share in (None, 0.5):
                for deterministic in (True, False):
                    model, tokens = build(kind, shape, dtype)
                    limit = None if share is None else int(share * keep_account_bytes(model, tokens))
                    offload = save_on_disk(
                        [directory], memory_limit=limit, deterministic=deterministic, min_bytes=64 << 10
                    )
                    name = f"{kind} {dtype} limit={share} deterministic={deterministic}"
                    found[name] = same_bits(model, tokens, offload)
                    offload.close()
    return found


def measure_gain(size: Size, directory: Path) -> dict[str, Any]:
    """Best samples per second, optimizer included, in the memory that keeping needs for one sample.

    Memory is the rise of the resident set in one step, for all variants alike. First the largest micro-batch that
    fits is looked for, then the variants take turns at theirs.
    """
    limit_bytes = _rss_of("keep", replace(size.gain_shape, batch=1), directory, 0)
    largest: dict[str, int] = {}
    tried = []
    for name in ("keep", "recompute", "ours"):
        for batch in (1, 2, 4, 8, 16):
            rss_bytes = _rss_of(name, replace(size.gain_shape, batch=batch), directory, limit_bytes)
            fits = rss_bytes is not None and rss_bytes <= limit_bytes * RSS_NOISE
            tried.append({"name": name, "batch": batch, "rss_bytes": rss_bytes, "fits": fits})
            if not fits:
                break
            largest[name] = batch
    trainers = {
        name: Trainer(name, replace(size.gain_shape, batch=batch), directory, limit_bytes)
        for name, batch in largest.items()
    }
    for trainer in trainers.values():
        trainer.seconds()
    rounds = [{name: trainer.seconds() for name, trainer in trainers.items()} for _ in range(size.gain_rounds)]
    for trainer in trainers.values():
        trainer.offload.close()
    rates = [{name: largest[name] / seconds for name, seconds in each.items()} for each in rounds]
    return {
        "limit_bytes": limit_bytes,
        "largest_batch": largest,
        "samples_per_s": {name: statistics.median(each[name] for each in rates) for name in largest},
        "gain": statistics.median(each["ours"] / max(each["keep"], each["recompute"]) for each in rates),
        "tried": tried,
    }


class Trainer:
    """One variant with its model, optimizer and micro-batch."""

    def __init__(self, name: str, shape: Shape, directory: Path, limit_bytes: int) -> None:
        self.model, tokens = build("gpt", shape)
        # What backward computes with besides saved tensors needs room too.
        self.offload = save_on_disk(
            [directory], memory_limit=int(GAIN_LIMIT_SHARE * limit_bytes) or None, min_bytes=64 << 10
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._run = make(self.model, tokens, offload=self.offload, directory=directory)[name]

    def train(self) -> None:
        self._run()
        self._optimizer.step()

    def seconds(self) -> float:
        return timed(self.model, self.train)


def _rss_of(name: str, shape: Shape, directory: Path, limit_bytes: int) -> Any:
    """How far one step raises the resident set; None if the memory limit is refused as too small."""
    trainer = Trainer(name, shape, directory, limit_bytes)
    try:
        for _ in range(2):
            trainer.seconds()
        zero(trainer.model)
        return peak_rss_bytes(trainer.train)
    except LimitTooSmallError:
        return None
    finally:
        trainer.offload.close()


def measure_curve(size: Size, directory: Path) -> list[dict[str, Any]]:
    """GPT with the device slowed down: at the fixed limit, and with the amount that the bandwidth hides."""
    model, tokens = build("gpt", size.shape)
    account_bytes = keep_account_bytes(model, tokens)
    points = []
    for gb_per_s in CURVE_GB_PER_S:
        for limit in (int(LIMIT_SHARE * account_bytes), None):
            engine = ThrottledEngine(PosixEngine(directory), bytes_per_s=gb_per_s * 1e9)
            offload = ActivationOffload(OffloadConfig(dirs=(str(directory),), memory_limit=limit), engines=[engine])
            for _ in range(2):
                timed(model, lambda offload=offload: step(model, tokens, plainly, offload))  # type: ignore[misc]
            ratios = []
            for _ in range(size.curve_rounds):
                keep_s = timed(model, lambda: step(model, tokens, plainly, _nothing()))
                ours_s = timed(model, lambda offload=offload: step(model, tokens, plainly, offload))  # type: ignore[misc]
                ratios.append(ours_s / keep_s)
            last = offload.stats().last
            assert last is not None
            points.append(
                {
                    "gb_per_s": gb_per_s,
                    "limit": "fixed" if limit else "adaptive",
                    "time_ratio": statistics.median(ratios),
                    "peak_ratio": last.peak_bytes / account_bytes,
                    "spilled_share": last.spilled_bytes / last.saved_bytes,
                }
            )
            offload.close()
    return points


def measure_disk(directory: Path, size_bytes: int) -> dict[str, float]:
    """Direct I/O in 8 MiB pieces by two threads over preallocated space, GB/s."""
    engine, piece_bytes = PosixEngine(directory), 8 << 20
    engine.reserve(size_bytes)
    offsets = range(0, size_bytes, piece_bytes)
    pages = [lease(size_bytes=piece_bytes, shift_bytes=0).image for _ in range(2)]
    for page in pages:
        page[:] = os.urandom(piece_bytes)

    def rate(move: Callable[[int, list[memoryview]], None]) -> float:
        def work(number: int) -> None:
            for offset in offsets[number::2]:
                move(offset, [pages[number]])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size_bytes / (time.perf_counter() - began_s) / 1e9

    rate(engine.write)
    rates = {"write_gb_per_s": rate(engine.write), "read_gb_per_s": rate(engine.read), "direct": float(engine.direct)}
    engine.close()
    return rates


def summary(models: dict[str, dict[str, Any]], bits: dict[str, bool], gain: float) -> dict[str, Any]:
    """The worst over the models."""
    each = list(models.values())
    return {
        "bits_equal": all(bits.values()) and all(m["bits_equal"] for m in each),
        "peak_ratio": max(m["peak_ratio"] for m in each),
        "peak_ratio_rss": max(m["peak_ratio_rss"] for m in each),
        "time_ratio": max(m["time_ratio"] for m in each),
        "thread_time_ratio": max(m["thread_time_ratio"] for m in each),
        "vs_recompute": max(m["vs_recompute"] for m in each),
        "vs_coarse": min(m["vs_coarse"] for m in each),
        "gain": gain,
    }


def provenance() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "processor": model.partition(": ")[2],
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "load_1min": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, about a minute")
    parser.add_argument("--dir", default=None, help="a directory on the SSD (default: the temporary directory)")
    parser.add_argument("--out", default=None, help="also write the JSON there")
    parser.add_argument("--only", choices=("models", "bits", "gain", "curve"), default=None)
    given = parser.parse_args()
    size = QUICK if given.quick else FULL
    torch.set_num_threads(1)
    give_freed_memory_back()
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        directory = Path(name)
        result: dict[str, Any] = {
            **provenance(),
            "quick": given.quick,
            "disk": measure_disk(directory, size.disk_bytes),
        }
        if given.only in (None, "models"):
            result["models"] = {}
            for kind in KINDS:
                result["models"][kind] = measure_model(kind, size, directory)
                print(kind, json.dumps(result["models"][kind]), file=sys.stderr, flush=True)
        if given.only in (None, "bits"):
            result["bits"] = measure_bits(size, directory)
        if given.only in (None, "gain"):
            result["gain"] = measure_gain(size, directory)
        if given.only in (None, "curve"):
            result["curve"] = measure_curve(size, directory)
    if given.only is None:
        result = {
            **summary(result["models"], result["bits"], result["gain"]["gain"]),
            "reach": REACH,
            **_rename(result),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        Path(given.out).write_text(text + "\n")


def _rename(result: dict[str, Any]) -> dict[str, Any]:
    """The details of the gain stand beside its figure."""
    return {("gain_runs" if key == "gain" else key): value for key, value in result.items()}


if __name__ == "__main__":
    main()
