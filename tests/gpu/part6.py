"""Test part 6: compiled models, captured graphs, and the `torch.distributed` backend on device tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from experiments.accelerator import commands
from experiments.accelerator.commands import EndedError
from experiments.accelerator.jobs import Job, run_job
from experiments.accelerator.models import Training
from tests.gpu.part1 import KILL
from tests.gpu.parts import Setting, newcomers, tells

CACHE, NO_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
BACKEND_S = 100.0
"""Seconds that the tests of the backend may take."""
BACKEND = {
    "collectives": (("tests/gpu/test_comm_cuda.py", "-k", "not ddp"), ("tests/contract/device/test_collectives.py",)),
    "DDP and surviving": (
        ("tests/gpu/test_comm_cuda.py", "-k", "ddp"),
        ("tests/integration/comm/test_surviving_on_devices.py",),
    ),
}
"""Case -> its tests on CUDA, and on `late`."""


def compiled(setting: Setting, kind: str = "", *, whole: bool = False, **fields: Any) -> Training:
    """Return a training whose blocks are compiled, or the whole model as in README's script.

    Of a rehearsal only the whole model goes through torch's autograd compiler, which takes most of the time.
    """
    backend = "inductor" if not setting.small else "aot_eager" if whole else "eager"
    return setting.training(kind, compiled=f"model {backend}" if whole else backend, **fields)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for the jobs of the body."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@tells("compiled_runs_equal", "compiled_members_equal", "compiled_equal")
def compiled_models(setting: Setting) -> None:
    """Run compiled jobs; what one of them has built, the others find."""
    with environment(CACHE, str(setting.folder / "cache")):
        value, note = setting.equal("compiled again", Job(training=compiled(setting, whole=True)))
        setting.tell("compiled_runs_equal", value, note=note)
        jobs = {f"{count} members": Job(training=compiled(setting, members=count)) for count in (2, 4)}
        setting.compare("compiled_members_equal", jobs)
        setting.compare("compiled_equal", {"2 stages": Job(training=compiled(setting, members=2), stages=2)})
        kinds = {"": "killed and joined", "bf16": "bf16, killed and joined", "autocast": "autocast, killed and joined"}
        killed = {
            case: Job(training=compiled(setting, kind, members=2), faults=KILL, losses=1)
            for kind, case in kinds.items()
        }
        setting.compare("compiled_equal", killed, joined=True)


@tells("compiled_join_s")
def joins(setting: Setting) -> None:
    """Kill a member, and time its replacement with the cache of its node and without any."""
    job = Job(training=compiled(setting, members=2, meters=True), faults=KILL, losses=1)
    for case, value in (("with the cache", "0"), ("without a cache", "1")):
        with environment(NO_CACHE, value):
            ran = setting.run(f"join {case}", job)
        found = newcomers(ran)
        if not found:
            raise EndedError(f"nobody joined {case}")
        first_s = min(each.ended_s for each in found[0].micro_batches)
        setting.tell("compiled_join_s", first_s - ran.run.started_s[found[0].id], case)


@tells("graphs_equal")
def graphs(setting: Setting) -> None:
    """Let the MLP of each block replay graphs, and try to capture a whole backward."""
    training = setting.training(members=2, compiled="graphs")
    setting.compare("graphs_equal", {"killed and joined": Job(training=training, faults=KILL, losses=1)}, joined=True)
    refused = Job(training=replace(training, members=1, compiled="capture"))
    ran = run_job(refused, setting.folder / "capture", deadline_s=setting.limited(60.0))
    is_named = ran.code not in (0, None) and "step.backward() was called while a graph of" in ran.output
    setting.tell("graphs_equal", is_named, "a captured backward is refused", note="" if is_named else ran.end())


@tells("backend")
def backend(setting: Setting) -> None:
    """Run the tests of the backend in processes of their own."""
    for case, (on_cuda, on_late) in BACKEND.items():
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(on_late if setting.small else on_cuda)]
        limit_s = setting.limited(BACKEND_S)
        try:
            text = commands.run(case, command, setting.folder / f"{case}.txt", deadline_s=limit_s)
        except EndedError as error:
            setting.tell("backend", None, case, str(error))
            continue
        summary = next((line for line in reversed(text.splitlines()) if " passed" in line), "nothing passed")
        skips = "skipped" in summary and not setting.small  # the suite of the port skips what concerns the host only
        setting.tell("backend", " passed" in summary and not skips, case, summary)
