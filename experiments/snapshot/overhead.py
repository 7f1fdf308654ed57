"""What backups and durable checkpoints cost a job that nothing happens to: step times, stalls, and torch's own ways.

    python -m experiments.snapshot.overhead [--rounds N] [--only KIND ...]

Four members on three simulated nodes train the model of `window_train.py`. Each kind of job runs once per round, in
turns; times come from the members' journals. Nothing here knows of a job's inside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from experiments.harness import ROOT, interleave, ratio
from experiments.journals import Member, Tail, member_of, read_run
from experiments.snapshot.files import torch_blocks
from experiments.snapshot.window import TIMEOUT_S, WAIT_S, WORKERS, node
from experiments.snapshot.workload import trained

BETWEEN = "_between"
BACKUPS = {"b0": 0, "b1": 1, "b2": 2, "durable": 1, "b0_between": 0, "b1_between": 1, "b2_between": 2}
"""Kind of job -> verified copies of each shard. `durable` writes checkpoints besides.

The accelerator of those named `_between` computes all layers at once, between forward and backward; that of the others
computes layer by layer, a third of the time in the forward and two thirds in the backward.
"""
EVERY = 10
"""Steps from one checkpoint to the next."""
WARM = 4
"""Steps before the first that counts: memory and connections are made in them."""
FLOOR_S = 1e-3
"""A shorter stall counts as this one: journals of four processes do not tell less."""
REFERENCE_BYTES = 240e6


@dataclass(frozen=True, kw_only=True)
class Load:
    """How large a job is, and how long."""

    layers: int = 20
    """Of a million parameters each."""
    wait_s: float = WAIT_S
    intervals: int = 3
    """Of so many checkpoints the steps count."""
    every: int = EVERY

    @property
    def counted(self) -> int:
        """Steps."""
        return self.every * self.intervals

    @property
    def steps(self) -> int:
        return WARM + self.counted + 1

    @property
    def state_bytes(self) -> int:
        """Parameters and AdamW's two moments of each, in float32."""
        return self.layers * (1024 * 1024 + 1024) * 12


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One job. Seconds."""

    step_s: float
    """The mean over whole intervals: a median would pass over the one step in ten that a checkpoint may slow down."""
    compute_s: float
    """Of the member that computes longest in a step, in the median of the steps: real computing and waiting."""
    stall_s: float
    """The longest time for which a step has waited for copies of a checkpoint, among all members; 0 without any."""
    gap_s: float
    """The longest excess of a gap next to a checkpoint, among all members; NaN without checkpoints."""
    other_s: float
    """The longest excess of any other gap: what the stall has to be seen against."""
    checkpoints: int


def gaps(member: Member) -> dict[int, float]:
    """Step -> seconds from its last micro-batch to the first of the next step, in which the loop computes nothing."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for done in member.micro_batches:
        first[done.step] = min(done.started_s, first.get(done.step, done.started_s))
        last[done.step] = max(done.ended_s, last.get(done.step, done.ended_s))
    return {step: first[step + 1] - last[step] for step in sorted(last) if step + 1 in first}


def excesses(found: Mapping[int, float], written: Iterable[int]) -> tuple[list[float], list[float]]:
    """What gaps next to a checkpoint take beyond the usual one, and what the other gaps do.

    Next to it: after its own step, whose state is taken, and after the next one, whose update copies what has not been
    read by then.
    """
    near = {step + later for step in written for later in (0, 1)}
    counted = {step: gap_s for step, gap_s in found.items() if step >= WARM}
    usual_s = statistics.median(gap_s for step, gap_s in counted.items() if step not in near)
    beside = [gap_s - usual_s for step, gap_s in counted.items() if step in near]
    return beside, [gap_s - usual_s for step, gap_s in counted.items() if step not in near]


def timed(members: Sequence[Member], written: Mapping[int, float], counted: int) -> Timed:
    """From the members' journals; `written`: steps whose checkpoints became complete, and the longest that a member has
    waited for each; `counted`: steps. Raises ValueError.
    """
    first, last = WARM - 1, WARM - 1 + counted
    if not all({first, last} <= set(member.advanced_s) for member in members):
        raise ValueError(f"expected every member to go on after steps {first} and {last}")
    began_s, ended_s = (max(member.advanced_s[step] for member in members) for step in (first, last))
    split = [excesses(gaps(member), written) for member in members]
    return Timed(
        step_s=(ended_s - began_s) / (last - first),
        compute_s=statistics.median(_computed(members, step) for step in range(first + 1, last + 1)),
        stall_s=max(written.values(), default=0.0),
        gap_s=max((s for near, _ in split for s in near), default=float("nan")),
        other_s=max(s for _, others in split for s in others),
        checkpoints=len(written),
    )


def _computed(members: Sequence[Member], step: int) -> float:
    return max(sum(d.ended_s - d.started_s for d in member.micro_batches if d.step == step) for member in members)


def play(root: Path, kind: str, load: Load) -> Timed:
    """One job from beginning to end. Raises RuntimeError if it ends badly or writes no checkpoint though it should."""
    with TemporaryDirectory(prefix=f"{kind}-", dir=root) as name:
        folder = Path(name)
        _run(folder, kind, load)
        members, written = _journals(folder)
        if kind == "durable" and not written:
            raise RuntimeError("expected checkpoints from the job that writes them; got none")
        found = timed(members, written, load.counted)
    print(f"{kind}: {found}", file=sys.stderr, flush=True)
    return found


def _run(folder: Path, kind: str, load: Load) -> None:
    script = ("--steps", str(load.steps), "--backups", str(BACKUPS[kind]), "--wait-s", str(load.wait_s))
    script += ("--layers", str(load.layers), *(() if kind.endswith(BETWEEN) else ("--by-layer",)))
    writes = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(load.every))
    options = writes if kind == "durable" else ()
    with ExitStack() as stack:
        etcd = EmbeddedEtcd(folder / "etcd", host="127.0.0.1")
        stack.callback(etcd.close)
        jobs = {name: stack.enter_context(node(folder, name, etcd.endpoint, script, options)) for name in WORKERS}
        for name, job in jobs.items():
            if job.wait(TIMEOUT_S) != 0:
                raise RuntimeError(f"node {name} ended badly: {(folder / f'{name}.log').read_text()[-2000:]}")


def _journals(folder: Path) -> tuple[list[Member], dict[int, float]]:
    """All members; and the steps whose checkpoints one of them has made complete, with the longest wait for each."""
    members, written, blocked_s = list[Member](), set[int](), dict[int, float]()
    for name in WORKERS:
        for member in read_run(folder / name).pids:
            lines = Tail(folder / name / "members" / f"{member}.jsonl").read()
            members.append(member_of(lines, member))
            written |= {line["step"] for line in lines if line["event"] == "checkpoint_written"}
            for line in lines:
                if line["event"] == "checkpoint":
                    blocked_s[line["step"]] = max(line["blocked_s"], blocked_s.get(line["step"], 0.0))
    return members, {step: blocked_s.get(step, 0.0) for step in sorted(written)}


def compared(found: Mapping[str, Sequence[Timed]], load: Load) -> dict[str, float]:
    """The figures, of the kinds of job that there are."""
    steps = {kind: [each.step_s for each in turns] for kind, turns in found.items()}
    values = {f"step_s_{kind}": statistics.median(times) for kind, times in steps.items()}
    pairs = {f"overhead_{backed}{way}": (backed + way, "b0" + way) for backed in ("b1", "b2") for way in ("", BETWEEN)}
    pairs["overhead_durable"] = ("durable", "b1")
    values |= {key: ratio(steps[a], steps[b]) for key, (a, b) in pairs.items() if a in steps and b in steps}
    computed = statistics.median(each.compute_s for turns in found.values() for each in turns)
    values["compute_s_per_240mb"] = computed / load.state_bytes * REFERENCE_BYTES
    if durable := found.get("durable"):
        values["stall_s"] = statistics.median(each.stall_s for each in durable)
        values["durable_stall"] = statistics.median(each.stall_s / each.step_s for each in durable)
        values["gap_s"] = statistics.median(each.gap_s for each in durable)
        values["other_gap"] = statistics.median(each.other_s / each.step_s for each in durable)
        values["checkpoints_written"] = float(sum(each.checkpoints for each in durable))
    return values


def against_torch(folder: Path, load: Load, stall_s: float) -> dict[str, float]:
    """Seconds for which torch's ways of saving block a loop with the same state on the same drive, over ours."""
    blocked = torch_blocks(folder, *trained(load.layers))
    ours_s = max(stall_s, FLOOR_S)
    return {
        **blocked,
        "vs_torch_save": blocked["torch_save_s"] / ours_s,
        "vs_dcp_async": blocked["dcp_async_s"] / ours_s,
    }


def figures(folder: Path, *, kinds: Sequence[str], rounds: int, load: Load) -> dict[str, float]:
    """All figures that these kinds of job give, `rounds` turns of each. `folder`: on the drive to measure."""
    folder.mkdir(parents=True, exist_ok=True)
    found = interleave({kind: partial(play, folder, kind, load) for kind in kinds}, rounds=rounds)
    values = compared(found, load)
    return values | (against_torch(folder, load, values["stall_s"]) if "durable" in kinds else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(BACKUPS), default=list(BACKUPS))
    parser.add_argument("--layers", type=int, default=20, help="millions of parameters")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="of each micro-batch, beside its computing")
    parser.add_argument("--intervals", type=int, default=3, help=f"of {EVERY} steps that count, in each job")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where to write: on the drive that is measured")
    args = parser.parse_args()
    load = Load(layers=args.layers, wait_s=args.wait_s, intervals=args.intervals)
    with TemporaryDirectory(prefix=".elastrain-overhead-", dir=args.folder) as name:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(json.dumps(figures(Path(name), kinds=args.only, rounds=args.rounds, load=load)))


if __name__ == "__main__":
    main()
