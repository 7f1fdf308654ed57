"""Offload against keeping, recomputing, `save_on_cpu` and plain `torch.save`: one line of JSON. See README.md."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from elastrain.offload.errors import LimitTooSmallError
from experiments.harness import Reach, add_record_flag, interleave, ratio, record, report
from experiments.offload.allocator import USUAL_ALLOCATOR
from experiments.offload.device import measure_disk, spill_directory
from experiments.offload.gain import measure_gain
from experiments.offload.models import KINDS, Shape
from experiments.offload.processes import Process, apart, side_by_side
from experiments.offload.variants import NAMES, ONLY_ON_DISK, WHY_NOT_DEEPSPEED
from experiments.offload.worker import Case, Worker

REACHES = {
    "bits_equal": Reach(limit=1, at_least=True),
    "peak_ratio": Reach(limit=0.40),
    "peak_ratio_rss": Reach(limit=0.40),
    "time_ratio": Reach(limit=1.03),
    "vs_recompute": Reach(limit=0.80),
    "vs_coarse": Reach(limit=1.5, at_least=True),
    "gain": Reach(limit=1.1, at_least=True),
}
LIMIT_SHARE = 0.30  # of what keeping everything needs at its peak
CURVE_GB_PER_S = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
WARM_STEPS = {"ours": 2, "recompute": 1}  # keeping is warm from its account
PARTS = ("models", "bits", "gain", "curve")
QUICK_PARTS = PARTS[:-1]  # the curve is asked for by its name: it takes a minute of its own


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to run. Width, heads and context are those of T5-small and BERT-small."""

    shape: Shape
    layers: dict[str, int]
    rounds: int
    bits_shape: Shape
    gain_shape: Shape
    gain_batches: tuple[int, ...]
    gain_rounds: int
    disk_bytes: int


QUICK = Size(
    shape=Shape(width=512, layers=4, tokens=224, batch=2),
    layers={"gpt": 4, "bert": 4, "t5": 4},
    rounds=3,
    bits_shape=Shape(width=128, layers=2, tokens=128, batch=2),
    gain_shape=Shape(width=256, layers=5, tokens=224, batch=1),
    gain_batches=(2, 4),  # no more than a minute and a half for all
    gain_rounds=3,
    disk_bytes=128 << 20,
)
CUDA = Size(
    shape=Shape(width=2048, layers=16, tokens=1024, batch=16, heads=32),
    layers={"gpt": 16, "bert": 14, "t5": 10},
    rounds=3,
    bits_shape=Shape(width=256, layers=4, tokens=256, batch=2),
    gain_shape=Shape(width=1024, layers=16, tokens=1024, batch=1, heads=16),
    gain_batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    gain_rounds=3,
    disk_bytes=4 << 30,
)
"""32 times the saved activations of FULL: more than 30 GB each."""
FULL = Size(
    shape=Shape(width=512, layers=16, tokens=512, batch=4),
    layers={"gpt": 16, "bert": 14, "t5": 10},
    rounds=2,
    bits_shape=Shape(width=256, layers=4, tokens=256, batch=2),
    gain_shape=Shape(width=384, layers=16, tokens=128, batch=1),
    gain_batches=(1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32),
    gain_rounds=3,
    disk_bytes=1 << 30,
)


def measure_model(kind: str, size: Size, directory: Path, device: str) -> dict[str, Any]:
    """Ratios are made within a round, in which the variants take turns; their median over the rounds is taken."""
    shape = replace(size.shape, layers=size.layers[kind])
    case = Case(name="keep", kind=kind, shape=shape, directory=directory, device=device)
    keep = Process(Worker, case)
    account_bytes = keep.ask("account")
    limited = replace(case, limit_bytes=int(LIMIT_SHARE * account_bytes))
    processes = {name: keep if name == "keep" else Process(Worker, replace(limited, name=name)) for name in NAMES}
    for name, steps in WARM_STEPS.items():
        for _ in range(steps):
            processes[name].ask("time")
    turns = {name: partial(process.ask, "time") for name, process in processes.items()}
    # Nothing is to be reached against `save_on_cpu`: one step is enough.
    save_on_cpu_s = turns["save_on_cpu"]()["wall_s"]
    times = interleave({name: turns[name] for name in NAMES if name != "save_on_cpu"}, rounds=size.rounds)
    digests = {name: process.ask("digest") for name, process in processes.items()}
    stats = processes["ours"].ask("stats")
    memory = {name: processes[name].ask("memory") for name in ("keep", "ours")}
    for process in processes.values():
        process.close()

    def over(above: str, below: str, unit: str = "wall_s") -> float:
        return ratio([each[unit] for each in times[above]], [each[unit] for each in times[below]])

    def seconds(name: str) -> dict[str, float]:
        return {unit: statistics.median(each[unit] for each in times[name]) for unit in times[name][0]}

    ours_bytes = memory["ours"]["account_bytes"]
    return {
        "activation_bytes": account_bytes,
        "bits_equal": digests["ours"] == digests["keep"],
        "peak_ratio": ours_bytes / account_bytes,
        "peak_ratio_rss": memory["ours"]["rss_bytes"] / memory["keep"]["rss_bytes"],
        "rss_over_account": {
            "keep": memory["keep"]["rss_bytes"] / account_bytes,
            "ours": memory["ours"]["rss_bytes"] / ours_bytes,
        },
        "time_ratio": over("ours", "keep"),
        "vs_recompute": over("ours", "recompute"),
        "vs_coarse": over("torch_save", "ours"),
        "vs_save_on_cpu": save_on_cpu_s / statistics.median(each["wall_s"] for each in times["ours"]),
        "keep_vs_recompute": over("keep", "recompute"),
        "keep_vs_coarse": over("torch_save", "keep"),
        "thread_time_ratio": over("ours", "keep", "thread_s"),
        "thread_time_vs_recompute": over("ours", "recompute", "thread_s"),
        "wall_s": {name: [each["wall_s"] for each in found] for name, found in times.items()},
        "seconds": {name: seconds(name) for name in times},
        "rss_bytes": {name: found["rss_bytes"] for name, found in memory.items()},
        "offload": stats,
    }


def measure_memory(kind: str, size: Size, directory: Path, device: str) -> dict[str, Any]:
    """Peaks only: they are the same on a busy machine."""
    shape = replace(size.shape, layers=size.layers[kind])
    case = Case(name="keep", kind=kind, shape=shape, directory=directory, device=device)
    account_bytes = _account_bytes(case)
    found: dict[str, Any] = {"activation_bytes": account_bytes}
    for name in ("keep", "ours"):
        process = Process(Worker, replace(case, name=name, limit_bytes=int(LIMIT_SHARE * account_bytes)))
        for _ in range(WARM_STEPS.get(name, 1)):
            process.ask("time")
        found[name] = process.ask("memory")
        process.close()
    return {
        **found,
        "peak_ratio": found["ours"]["account_bytes"] / account_bytes,
        "peak_ratio_rss": found["ours"]["rss_bytes"] / found["keep"]["rss_bytes"],
        "rss_over_account": {
            "keep": found["keep"]["rss_bytes"] / account_bytes,
            "ours": found["ours"]["rss_bytes"] / found["ours"]["account_bytes"],
        },
    }


def measure_coarse(kind: str, size: Size, directory: Path, device: str) -> dict[str, Any]:
    """Ours against `torch.save` whose files leave the page cache, so that both really give the memory up."""
    shape = replace(size.shape, layers=size.layers[kind])
    case = Case(name="keep", kind=kind, shape=shape, directory=directory, device=device)
    limited = replace(case, limit_bytes=int(LIMIT_SHARE * _account_bytes(case)))
    processes = {name: Process(Worker, replace(limited, name=name)) for name in ("ours", ONLY_ON_DISK)}
    for _ in range(WARM_STEPS["ours"]):
        processes["ours"].ask("time")
    times = interleave({name: partial(each.ask, "time") for name, each in processes.items()}, rounds=size.rounds)
    for process in processes.values():
        process.close()
    wall_s = {name: [each["wall_s"] for each in found] for name, found in times.items()}
    return {"vs_coarse_only_on_disk": ratio(wall_s[ONLY_ON_DISK], wall_s["ours"]), "wall_s": wall_s}


def _account_bytes(case: Case) -> int:
    process = Process(Worker, case)
    found: int = process.ask("account")
    process.close()
    return found


def measure_bits(shape: Shape, directory: Path, device: str) -> dict[str, bool]:
    """Small models: every kind, dtype and option, three steps each, against keeping everything."""
    numbers = (("float32", False), ("bfloat16", False), ("float64", False), ("float32", True))
    cases = {
        f"{kind} {dtype}{' autocast' if autocast else ''}": Case(
            name="keep",
            kind=kind,
            shape=shape,
            directory=directory,
            device=device,
            dtype=getattr(torch, dtype),
            autocast=autocast,
            min_bytes=16 << 10,
        )
        for kind, (dtype, autocast) in product(KINDS, numbers)
    }
    found = zip(cases, side_by_side(_same_bits, list(cases.values())), strict=True)
    return {f"{name} {option}": equal for name, options in found for option, equal in options.items()}


def _same_bits(case: Case) -> dict[str, bool]:
    keep = Worker(case)
    account_bytes = keep.account()
    expected = []
    for _ in range(3):
        keep.time()
        expected.append(keep.digest())
    found = {}
    for share, deterministic in product((None, 0.5), (True, False)):
        limit_bytes = None if share is None else int(share * account_bytes)
        ours = replace(case, name="ours", limit_bytes=limit_bytes, deterministic=deterministic)
        found[f"limit={share} deterministic={deterministic}"] = _three_steps(ours, expected)
    return found


def _three_steps(case: Case, expected: list[str]) -> bool:
    """Whether each step has the expected bits; under the smallest limit that works where the case's own is below it.

    What has to be in memory at once is more than half of what a very small model saves.
    """
    try:
        worker = Worker(case)
        same = []
        for _ in expected:
            worker.time()
            same.append(worker.digest())
    except LimitTooSmallError as error:
        return _three_steps(replace(case, limit_bytes=error.smallest_bytes), expected)
    return same == expected


def measure_curve(shape: Shape, directory: Path, device: str, *, rounds: int) -> list[dict[str, Any]]:
    """GPT with the device slowed down: at the fixed limit, and with the amount that the bandwidth hides."""
    case = Case(name="keep", kind="gpt", shape=shape, directory=directory, device=device)
    keep = Process(Worker, case)
    account_bytes = keep.ask("account")
    points = []
    for gb_per_s, share in product(CURVE_GB_PER_S, (LIMIT_SHARE, None)):
        limit_bytes = None if share is None else int(share * account_bytes)
        slowed = replace(case, name="ours", limit_bytes=limit_bytes, bytes_per_s=gb_per_s * 1e9)
        processes = {"keep": keep, "ours": Process(Worker, slowed)}
        for _ in range(WARM_STEPS["ours"]):  # from here on there is a plan
            processes["ours"].ask("time")
        times = interleave(
            {name: lambda process=process: process.ask("time")["wall_s"] for name, process in processes.items()},  # type: ignore[misc]
            rounds=rounds,
        )
        stats = processes["ours"].ask("stats")
        processes["ours"].close()
        points.append(
            {
                "gb_per_s": gb_per_s,
                "limit": "fixed" if share else "adaptive",
                "time_ratio": ratio(times["ours"], times["keep"]),
                "peak_ratio": stats["peak_bytes"] / account_bytes,
                **stats,
            }
        )
    keep.close()
    return points


def summary(models: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The worst over the models."""
    most = ("peak_ratio", "peak_ratio_rss", "time_ratio", "thread_time_ratio", "vs_recompute")
    return {
        "bits_equal": float(all(each["bits_equal"] for each in models.values())),
        **{name: max(each[name] for each in models.values()) for name in most},
        "vs_coarse": min(each["vs_coarse"] for each in models.values()),
    }


def measure(
    parts: Sequence[str], kinds: Sequence[str], size: Size, directory: Path, device: str, *, quick: bool
) -> dict[str, Any]:
    """All figures of the parts that are asked for."""
    figures: dict[str, Any] = {}
    if "models" in parts:
        models = {kind: measure_model(kind, size, directory, device) for kind in kinds}
        figures |= {**summary(models), "models": models, "deepspeed": None, "why_not_deepspeed": WHY_NOT_DEEPSPEED}
    if "bits" in parts:
        bits = measure_bits(size.bits_shape, directory, device)
        figures |= {
            "bits_equal": min(figures.get("bits_equal", 1.0), float(all(bits.values()))),
            "bits_tried": len(bits),
            "bits_wrong": [name for name, equal in bits.items() if not equal],
        }
    if "gain" in parts:
        runs = {
            kind: measure_gain(
                kind, size.gain_shape, directory, device, batches=size.gain_batches, rounds=size.gain_rounds
            )
            for kind in (kinds[:1] if quick else kinds)
        }
        figures |= {"gain": min(each["gain"] for each in runs.values()), "gain_runs": runs}
    if "curve" in parts:
        figures["curve"] = measure_curve(
            replace(size.shape, layers=size.layers["gpt"]), directory, device, rounds=3 if quick else 2
        )
    if "memory" in parts:
        memory = {kind: measure_memory(kind, size, directory, device) for kind in kinds}
        worst = {name: max(each[name] for each in memory.values()) for name in ("peak_ratio", "peak_ratio_rss")}
        figures |= {**worst, "memory": memory}
    if "coarse" in parts:
        coarse = {kind: measure_coarse(kind, size, directory, device) for kind in kinds}
        worst_ratio = min(each["vs_coarse_only_on_disk"] for each in coarse.values())
        figures |= {"vs_coarse_only_on_disk": worst_ratio, "coarse": coarse}
    return figures


def _has_cuda() -> bool:
    """Asked in another process: this one forks, which a CUDA context would not survive."""
    return apart(torch.cuda.is_available)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.offload.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small models, about a minute and a half")
    parser.add_argument("--dir", default=None, help="a directory on the SSD (default: the temporary directory)")
    parser.add_argument("--only", choices=(*PARTS, "coarse", "memory"), default=None)
    parser.add_argument("--model", choices=KINDS, default=None, help="one model instead of three")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models are")
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="of GPT and T5 in the part `models` (published: 0.1)"
    )
    parser.add_argument(USUAL_ALLOCATOR, action="store_true", help="the C library's defaults, for all variants")
    add_record_flag(parser)
    given = parser.parse_args()
    if not 0 <= given.dropout < 1:
        parser.error(f"--dropout must be at least 0 and less than 1; got {given.dropout:g}")
    if given.device == "cuda" and not _has_cuda():
        parser.error("--device cuda: this machine has no CUDA device that torch can use")
    parts = (QUICK_PARTS if given.quick else PARTS) if given.only is None else (given.only,)
    size = QUICK if given.quick else CUDA if given.device == "cuda" else FULL
    size = replace(size, shape=replace(size.shape, dropout=given.dropout))
    kinds = KINDS if given.model is None else (given.model,)
    with tempfile.TemporaryDirectory(dir=spill_directory(parser, given.dir)) as name:
        figures = measure(parts, kinds, size, Path(name), given.device, quick=given.quick)
        figures["disk"] = apart(measure_disk, Path(name), size.disk_bytes)
    settings = {
        "parts": parts,
        "kinds": kinds,
        "device": given.device,
        "usual_allocator": given.usual_allocator,
        **asdict(size),
    }
    if given.record:
        record("offload", figures, quick=given.quick, settings=settings)
    report(figures, {name: reach for name, reach in REACHES.items() if name in figures})
