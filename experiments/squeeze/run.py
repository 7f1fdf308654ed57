"""How many losses does a job survive at a memory limit at which its undisturbed plan just fits?

`python -m experiments.squeeze.run [--quick]`. Eight members; four are killed one after another and nobody comes back.
First without a limit, to know what the undisturbed plan takes; then at that limit, with an SSD directory and without.
Where this machine lets us make memory cgroups, the kernel itself enforces the limit; else the measured peaks tell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import Run, read_member, read_run
from experiments.squeeze.groups import ended_for_memory, folder_of_groups, peaks_bytes
from experiments.squeeze.worker import GROUP_LIMIT, GROUPS

MEMBERS = 8
LOSSES = 4
KERNEL_SLACK = 1.04
"""The kernel counts more than tensors (page tables, sockets, pages of files), and not the same in every run."""
NO_LIMIT = "1T"
"""A limit that nothing reaches: the same accounting and the same allocator as under one that binds."""
REACHES = {
    "losses_survived": Reach(limit=LOSSES, at_least=True),
    "losses_survived_without": Reach(limit=LOSSES - 1),
    "step_time_ratio": Reach(limit=1.10),
    "digest_equal": Reach(limit=1, at_least=True),
    "peak_to_limit": Reach(limit=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size. A member is killed every `apart` steps: its backups need some of them to be whole again."""

    layers: int
    width: int
    micro_batch_size: int
    first: int = 3
    apart: int = 3

    @property
    def steps(self) -> int:
        return self.first + LOSSES * self.apart

    def script(self, steps: int) -> Script:
        options = {
            "steps": steps,
            "layers": self.layers,
            "width": self.width,
            "micro-batch-size": self.micro_batch_size,
        }
        words = tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
        return Script(path=ROOT / "experiments" / "squeeze" / "worker.py", args=words)

    def faults(self) -> str:
        """m1 to m4, in the middle of a backward; m0 stays to be watched."""
        at = [self.first + index * self.apart for index in range(LOSSES)]
        return "".join(f"kill --target member:m{i + 1} --at step={step},phase=backward\n" for i, step in enumerate(at))


@dataclass(frozen=True, kw_only=True)
class Found:
    """One job: its run, what it said at its end, and the peaks that the runtime and the kernel measured, in bytes."""

    run: Run
    folder: Path
    said: str
    peak_bytes: int
    kernel_peak_bytes: int | None
    ended_for_memory: tuple[str, ...]

    @property
    def losses_survived(self) -> int:
        """How many killed members the others outlived by a committed step, before one was ended for memory."""
        stop_s = min((self.run.deaths_s[m] for m in self.run.deaths_s if not self.run.members[m].faults), default=None)
        kills_s = sorted(fault.at_s for member in self.run.members.values() for fault in member.faults)
        commits_s = [each.at_s for member in self.run.members.values() for each in member.passed]
        allowed = [at_s for at_s in commits_s if stop_s is None or at_s < stop_s]
        return sum(1 for at_s in kills_s if any(commit > at_s for commit in allowed))


def job(
    folder: Path, setting: Setting, *, steps: int, limit: str, disk: Path | None, faults: bool, group_limit: int | None
) -> Found:
    """One job to its end, good or bad."""
    options = ["--max-restarts", "0", "--memory-limit", limit]
    if disk is not None:
        options += ["--offload-dir", str(disk)]
    folder.mkdir()
    if faults:
        (folder / "faults.txt").write_text(setting.faults())
        options += ["--faults", str(folder / "faults.txt")]
    run = folder / "run"
    with folder_of_groups(f"elastrain-squeeze-{os.getpid()}") as groups:
        with (
            _groups_told(groups, group_limit),
            elastic(run, setting.script(steps), members=MEMBERS, options=options) as process,
        ):
            try:
                said = finish(process, run, timeout_s=400)
            except RuntimeError as error:  # a job that ends badly is one of the things measured here
                said = str(error)
        kernel = peaks_bytes(groups) if groups is not None else {}
        ended = ended_for_memory(groups) if groups is not None else ()
    peaks = [line["peak_bytes"] for line in journal_lines(run, "memory")]
    return Found(
        run=read_run(run),
        folder=run,
        said=said,
        peak_bytes=max(peaks, default=0),
        kernel_peak_bytes=max(kernel.values(), default=None),
        ended_for_memory=ended,
    )


@contextmanager
def _groups_told(groups: Path | None, limit_bytes: int | None) -> Iterator[None]:
    """Workers inherit where their groups are to be made."""
    told = {} if groups is None else {GROUPS: str(groups)}
    if groups is not None and limit_bytes is not None:
        told[GROUP_LIMIT] = str(limit_bytes)
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            del os.environ[name]


def journal_lines(run: Path, event: str) -> list[dict[str, Any]]:
    """All members' lines of one kind."""
    files = sorted((run / "members").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def step_times_s(run: Run, member: str = "m0") -> dict[int, float]:
    """Step -> seconds between this member's commits of the step before and of this one."""
    passed = sorted(run.members[member].passed, key=lambda each: each.step)
    return {b.step: b.at_s - a.at_s for a, b in itertools.pairwise(passed)}


def slowdown(found: Found, setting: Setting) -> float:
    """Median step after the last loss over the median step before the first, divided by what sharing the work costs."""
    times_s = step_times_s(found.run)
    last = setting.first + (LOSSES - 1) * setting.apart
    before = statistics.median(times_s[step] for step in range(1, setting.first))
    after = statistics.median(times_s[step] for step in range(last + 1, setting.steps))
    return after / before / (MEMBERS / (MEMBERS - LOSSES))


def measured(folder: Path, setting: Setting) -> dict[str, Any]:
    """The keys of the README."""
    disk = folder / "disk"
    disk.mkdir()
    # Nothing is timed but the job with offload, so the others share the machine.
    with alone(folder / "alone", setting.script(setting.steps)) as process:
        plain = job(folder / "undisturbed", setting, steps=4, limit=NO_LIMIT, disk=None, faults=False, group_limit=None)
        limit_bytes = plain.peak_bytes
        kernel_bytes = None if plain.kernel_peak_bytes is None else round(plain.kernel_peak_bytes * KERNEL_SLACK)
        how: dict[str, Any] = {"steps": setting.steps, "faults": True, "group_limit": kernel_bytes}
        without = job(folder / "without", setting, limit=NO_LIMIT, disk=None, **how)
        finish(process, folder / "alone", timeout_s=400)
    ours = job(folder / "with", setting, limit=str(limit_bytes), disk=disk, **how)
    reference = read_member(folder / "alone")
    show(ours, without)
    rooms = journal_lines(ours.folder, "room")
    finished = "finished after step" in ours.said
    return {
        "losses_survived": ours.losses_survived,
        "losses_survived_without": without.losses_survived,
        "step_time_ratio": slowdown(ours, setting) if finished else None,
        "digest_equal": {m.digest for m in ours.run.members.values() if m.digest is not None} == {reference.digest},
        "peak_to_limit": ours.peak_bytes / limit_bytes,
        "peak_to_limit_without": without.peak_bytes / limit_bytes,
        "limit_bytes": limit_bytes,
        "enforced_by_kernel_bytes": kernel_bytes,
        "kernel_peak_bytes": ours.kernel_peak_bytes,
        "ended_for_memory_with": len(ours.ended_for_memory),
        "ended_for_memory_without": len(without.ended_for_memory),
        "activations_bytes": max((each["need_activations_bytes"] for each in rooms), default=0),
        "activations_kept_least_bytes": min((each["activations_bytes"] for each in rooms), default=0),
        "shards_on_disk_most": max((each["shards_on_disk"] for each in rooms), default=0),
        "left_on_disk": len(list(disk.iterdir())),
    }


def show(ours: Found, without: Found) -> None:
    """What one survivor decided, and how both jobs ended."""
    for line in journal_lines(ours.folder, "room"):
        if line["member"] == "m0":
            print(f"m0: {line['reason']}")
    for name, found in (("with", ours), ("without", without)):
        peak = found.peak_bytes / 2**20
        print(
            f"{name:<8} peak {peak:.0f} MiB, ended for memory: {', '.join(found.ended_for_memory) or 'nobody'}; ",
            end="",
        )
        print(found.said.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model (≤ 90 s on 2 quiet cores)")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    setting = (
        Setting(layers=8, width=512, micro_batch_size=640)
        if args.quick
        else Setting(layers=12, width=768, micro_batch_size=1024)
    )
    with tempfile.TemporaryDirectory(prefix="elastrain-squeeze-", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        figures = measured(Path(name), setting)
    settings = {"members": MEMBERS, "losses": LOSSES, "layers": setting.layers, "width": setting.width}
    if args.record:
        record("squeeze", figures, quick=args.quick, settings=settings | {"micro_batch_size": setting.micro_batch_size})
    met = report(figures, REACHES)
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
