"""Test part 5: memory limits in jobs on a device, drives, and the tests for a GPU that pytest runs."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise

from experiments.accelerator import commands
from experiments.accelerator.jobs import Job, Ran
from experiments.accelerator.limits import DEEP, TIER, Limited, highest_bytes, limits
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import FIRST, Training
from tests.gpu.parts import LIMIT_S, Setting, tells

GPT = Training(model="124m bf16", members=3, steps=5, micro_batches=3, micro_batch_size=8, backups="all", peaks=True)
GIB = 1 << 30
SUITES_S = 150.0
"""The longest time of the tests that pytest runs."""


@tells("limit_kept", "limit_bits_equal")
def kept(setting: Setting) -> None:
    """Run a job with 60 % of the memory that it needed and a loss, and one with `save_on_disk` in its loop."""
    bench = Bench(
        folder=setting.folder / "limits",
        device=setting.device,
        start=setting.start,
        deadline_s=setting.limited(LIMIT_S),
    )
    case = Limited(DEEP, TIER) if setting.small else Limited(GPT, "1G")
    found = limits(bench, case)
    note = f"of {found['limit_need_mb']:.0f} MB; went to {', '.join(found['limit_left_to'])}"
    setting.tell("limit_kept", found["limit_kept"], note=note)
    setting.tell("limit_bits_equal", bool(found["limit_bits_equal"]))


@tells("limit_ideal")
def ideal(setting: Setting) -> None:
    """Compare the speed of a job of one with 50 % of the memory that it needed with that without a limit."""
    training = replace(GPT, device=setting.device, members=1, steps=10)
    if setting.small:
        training = replace(DEEP, device=setting.device, members=1, micro_batches=1, pause_s=0.0)
    free = setting.run("free", Job(training=training))
    limit = ("--memory-limit", str(highest_bytes(free) // 2), "--host-tier", "64M" if setting.small else "16G")
    limited = setting.run("limited", Job(training=training, options=limit))
    setting.tell("limit_ideal", _step_s(free) / _step_s(limited))


@tells("gds")
def drives(setting: Setting) -> None:
    """Write memory of the device to a drive and read it back, by KvikIO and by `torch.cuda.gds`."""
    for way in ("kvikio", "torch"):
        (folder := setting.folder / f"drive-{way}").mkdir(parents=True)
        size = str((1 << 20) if setting.small else GIB)
        command = ["-m", "tests.gpu.moved", setting.device, size, str(folder), way]
        try:
            text = commands.run(way, command, folder / "output.txt", deadline_s=setting.limited(LIMIT_S))
        except commands.EndedError as error:
            setting.tell("gds", None, way, str(error))
            continue
        told = json.loads(text.splitlines()[-1])
        rates = f"written at {told['write']:.1f} GB/s, read at {told['read']:.1f} GB/s"
        setting.tell("gds", told["equal"], way, f"{told['by']}: {rates}")


@tells("gpu_tests")
def suites(setting: Setting) -> None:
    """Run the tests of this folder that pytest runs. Without a GPU they are skipped."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "tests/contract/offload/test_gds.py"]
    output = setting.folder / "pytest.txt"
    text = commands.run("pytest", command, output, deadline_s=setting.limited(SUITES_S))
    setting.tell("gpu_tests", True, note=text.strip().splitlines()[-1])


def _step_s(ran: Ran) -> float:
    """Return the median time of a step."""
    [member] = ran.run.members.values()
    passed_s = [each.at_s for each in member.passed]
    return statistics.median(later - earlier for earlier, later in pairwise(passed_s[FIRST:]))
