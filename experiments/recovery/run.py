"""What does the loss of a member cost those who are left? SIGKILL at random points of a step, again and again.

`python -m experiments.recovery.run [--quick]`. Puts the storm, the matrix and the undisturbed jobs together; what the
figures mean is in the README, how they are computed in `figures.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrain.job.batch import DataOrder
from experiments import timeline
from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import TRAIN_GPT, Script, alone, finish, unwind_on_sigterm
from experiments.journals import Member, Run, read_member
from experiments.recovery import blackhole, matrix, nodes
from experiments.recovery.figures import (
    Loss,
    Rejoin,
    loss_of,
    rejoin_of,
    samples_amiss,
    steps_lost,
    uncommitted,
    undisturbed_standstills_s,
    undisturbed_walls_s,
    wrong_samples,
)
from experiments.recovery.peers import run as peers
from experiments.recovery.storm import Storm, storm
from experiments.train_gpt.data import Windows

REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "steps_lost": Reach(limit=0),
    "samples_wrong_steps": Reach(limit=0),
    "detect_s": Reach(limit=0.02),
    "comm_recovery_s": Reach(limit=0.05),
    "overhead_s": Reach(limit=0.1),
    "standstill_s": Reach(limit=0.1),
    "rejoin_stall_s": Reach(limit=0.1),
}
NODES_REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "steps_lost": Reach(limit=0),
    "samples_lost": Reach(limit=0),
    "samples_repeated": Reach(limit=0),
    "comm_recovery_s": Reach(limit=0.05),
    "node_standstill_s": Reach(limit=0.15),
    "etcd_outage_delay_s": Reach(limit=0.1),
    "blackhole_standstill_s": Reach(limit=4),
    "leftovers": Reach(limit=0),
}
MEMBERS = 4
RUN_LENGTH = 2
CONTEXT = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One size of the experiment. Batch sizes are in windows."""

    steps: int
    kills: int
    global_batch_size: int
    seed: int

    @property
    def order(self) -> DataOrder:
        return DataOrder(
            dataset_size=len(Windows("train", context=CONTEXT)),
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.global_batch_size // 16,
        )

    @property
    def script(self) -> Script:
        order = self.order
        options = {
            "steps": self.steps,
            "run-length": RUN_LENGTH,
            "global-batch-size": order.global_batch_size,
            "micro-batch-size": order.micro_batch_size,
        }
        return Script(
            path=TRAIN_GPT, args=tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
        )

    @property
    def runs(self) -> int:
        return self.order.micro_batches // RUN_LENGTH


def figures(found: Storm, reference: Member, setting: Setting) -> dict[str, Any]:
    """The keys of the README: medians, with the worst of all kills beside them."""
    run = found.run
    members = list(run.members.values())
    losses = losses_of(found, setting)
    rejoins = [rejoin for name in run.replaces if (rejoin := rejoin_of(run, name)) is not None]
    ends = {member.digest for member in members if member.digest is not None}
    standstills = [gap for view in run.views for gap in undisturbed_standstills_s(run, view)]
    return {
        "kills": len(losses),
        "rejoins": len(rejoins),
        "digest_equal": ends == {reference.digest},
        "steps_lost": steps_lost(members) + len(uncommitted(members, setting.steps)),
        "samples_wrong_steps": len(wrong_samples([*members, reference], setting.order)),
        **_middle_and_worst("detect_s", [loss.detect_s for loss in losses]),
        **_middle_and_worst("comm_recovery_s", [loss.comm_recovery_s for loss in losses]),
        **_middle_and_worst("overhead_s", [loss.overhead_s for loss in losses if loss.overhead_s is not None]),
        **_middle_and_worst("standstill_s", [loss.standstill_s for loss in losses]),
        "standstills_s": [loss.standstill_s for loss in losses],
        **_middle_and_worst("standstill_undisturbed_s", standstills),
        **_middle_and_worst("redone_s", [loss.redone_s for loss in losses]),
        **_middle_and_worst("rejoin_stall_s", [rejoin.stall_s for rejoin in rejoins]),
        **_middle_and_worst("rejoin_entry_s", [rejoin.entry_stall_s for rejoin in rejoins]),
        **_middle_and_worst("rejoin_standstill_s", [rejoin.standstill_s for rejoin in rejoins]),
        **_middle_and_worst("rejoin_first_step_s", _there([rejoin.first_step_stall_s for rejoin in rejoins])),
        **_middle_and_worst("rejoin_after_s", [rejoin.warm_up_s for rejoin in rejoins]),
        **_middle_and_worst("rejoin_cpu_s", [found.warm_up_cpu_s.get(rejoin.member, 0.0) for rejoin in rejoins]),
        **_middle_and_worst("step_s", undisturbed_walls_s(run, MEMBERS)),
    }


def losses_of(found: Storm, setting: Setting) -> list[Loss]:
    return [loss_of(found.run, name, at_s, runs=setting.runs) for name, at_s in found.killed_s.items()]


def _there(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _middle_and_worst(key: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {key: None, f"{key[:-2]}_worst_s": None}
    return {key: statistics.median(values), f"{key[:-2]}_worst_s": max(values)}


def reference_of(folder: Path, script: Script, *, timeout_s: float = 3600.0) -> Member:
    """The journal of the undisturbed job of one."""
    with alone(folder, script) as process:
        finish(process, folder, timeout_s=timeout_s)
    return read_member(folder)


def plot(path: Path, run: Run, loss: Loss) -> Path:
    """One recovery from a step before the kill to two steps after it."""
    drawn, (axes,) = timeline.figure(1, heights=(1,), size=(9, 3))
    step_s = max(undisturbed_walls_s(run, MEMBERS), default=1.0)
    begin_s, end_s = loss.killed_s - step_s, loss.killed_s + 2 * step_s
    names = [
        name
        for name in run.members
        if run.started_s[name] < end_s and run.deaths_s.get(name, loss.killed_s) >= loss.killed_s
    ]
    timeline.members(axes, run, names, origin_s=loss.killed_s)
    timeline.kills(axes, names, {loss.member: loss.killed_s}, origin_s=loss.killed_s)
    resumed_s = loss.resumed_s - loss.killed_s
    axes.axvline(0, color=timeline.LOST, linewidth=1, label=f"SIGKILL of {loss.member}, in step {loss.step}")
    axes.axvline(
        resumed_s, color=timeline.BACK, linewidth=1, label=f"the others go on, {resumed_s * 1000:.0f} ms later"
    )
    axes.set_xlim(begin_s - loss.killed_s, end_s - loss.killed_s)
    axes.set_xlabel("seconds since the kill; shades alternate by step, grey is a process that starts")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return timeline.save(drawn, path)


def show(losses: Sequence[Loss], rejoins: Sequence[Rejoin]) -> None:
    """A line per kill and per newcomer, in milliseconds."""
    print(f"{'killed':<8}{'step':>5}{'detect':>9}{'recover':>9}{'redone':>9}{'overhead':>10}{'standstill':>12}   (ms)")
    for loss in losses:
        overhead = f"{loss.overhead_s * 1e3:10.0f}" if loss.overhead_s is not None else f"{'–':>10}"
        print(
            f"{loss.member:<8}{loss.step:>5}{loss.detect_s * 1e3:9.1f}{loss.comm_recovery_s * 1e3:9.1f}"
            f"{loss.redone_s * 1e3:9.0f}{overhead}{loss.standstill_s * 1e3:12.1f}"
        )
    for rejoin in rejoins:
        first = f"{rejoin.first_step_stall_s * 1e3:.0f}" if rejoin.first_step_stall_s is not None else "–"
        print(
            f"{rejoin.member:<8}{rejoin.step:>5}  back after {rejoin.warm_up_s:.1f} s; "
            f"the others waited {rejoin.entry_stall_s * 1e3:.0f} ms more than usual, {first} after its first step"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="half the micro-batch, few kills (≤ 90 s on 2 quiet cores)"
    )
    parser.add_argument("--nodes", action="store_true", help="three simulated nodes with an etcd, whole nodes killed")
    parser.add_argument("--only", choices=("storm", "matrix", "blackhole"), help="one part of the experiment")
    parser.add_argument("--peers", action="store_true", help="the storm, and the same under torchrun and TorchFT")
    parser.add_argument("--kills", type=int, help="at most so many kills in the storm")
    parser.add_argument("--steps", type=int, help="steps of the storm")
    parser.add_argument("--outage", type=float, help="with --nodes: seconds for which etcd stands still")
    parser.add_argument("--cuts", type=int, help="with --nodes: how often a cable is cut")
    parser.add_argument("--seed", type=int, default=0, help="chooses victims and moments")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    if args.nodes:
        return main_nodes(args)
    setting = Setting(
        steps=args.steps or ((48 if args.peers else 28) if args.quick else 200),
        kills=args.kills or (3 if args.quick else 100),
        global_batch_size=64 if args.quick else 128,
        seed=args.seed,
    )
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-recovery-") as name:
        if args.only in (None, "storm"):
            values |= measured(Path(name), setting, draw=args.record and not args.quick)
        if args.peers:
            values |= peers.compared(values, _peers_setting(setting), quick=args.quick, keep=args.record)
        elif args.only in (None, "matrix"):
            values |= struck(Path(name), quick=args.quick, sofar=values.get("digest_equal", True))
    if args.record and not args.peers:
        settings = {"members": MEMBERS, "steps": setting.steps, "global_batch_size": setting.global_batch_size}
        settings |= {"seed": setting.seed, "only": args.only, "kills_at_most": setting.kills}
        record("recovery", values, quick=args.quick, settings=settings)
    reaches = REACHES | peers.REACHES
    met = report(values, {key: reach for key, reach in reaches.items() if key in values})
    return 0 if met or args.quick else 1


def main_nodes(args: argparse.Namespace) -> int:
    """What `--nodes` does; `--only` as for the rest."""
    setting = Setting(
        steps=args.steps or (70 if args.quick else 240),
        kills=args.kills or (2 if args.quick else 10),
        global_batch_size=64 if args.quick else 128,
        seed=args.seed,
    )
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-recovery-") as name:
        if args.only in (None, "storm"):
            outage_s = args.outage or (6.0 if args.quick else 30.0)
            values |= measured_nodes(Path(name), setting, outage_s=outage_s)
        if args.only in (None, "blackhole"):
            cut = measured_hosts(Path(name), setting, cuts=args.cuts or (1 if args.quick else 3))
            values |= cut | {"digest_equal": values.get("digest_equal", True) and cut["digest_equal"]}
        if args.only in (None, "matrix"):
            cells = matrix.of_nodes(Path(name), quick=args.quick)
            values["digest_equal"] = values.get("digest_equal", True) and all(cell.held for cell in cells)
            values |= {"matrix_cells": len(cells), "matrix_failed": sum(not cell.held for cell in cells)}
    settings = {"nodes": nodes.NODES, "steps": setting.steps, "global_batch_size": setting.global_batch_size}
    settings |= {"seed": setting.seed, "simulated": True, "only": args.only}
    if args.record:
        record("recovery", values, quick=args.quick, settings=settings)
    met = report(values, {key: reach for key, reach in NODES_REACHES.items() if values.get(key) is not None})
    return 0 if met or args.quick else 1


def measured_hosts(folder: Path, setting: Setting, *, cuts: int) -> dict[str, Any]:
    """The cuts between three hosts, and their reference."""
    cut = blackhole.measured(folder / "hosts", setting.script, steps=setting.steps, cuts=cuts)
    digests = cut.pop("blackhole_digests", None)
    if digests is None:
        return cut | {"digest_equal": True}
    return cut | {"digest_equal": digests == [reference_of(folder / "hosts-alone", setting.script).digest]}


def measured_nodes(folder: Path, setting: Setting, *, outage_s: float) -> dict[str, Any]:
    """The outage and the kills on three nodes, and their reference."""
    found = nodes.kill_nodes(
        folder / "nodes",
        setting.script,
        steps=setting.steps,
        kills=setting.kills,
        outage_s=outage_s,
        seed=setting.seed,
    )
    reference = reference_of(folder / "alone", setting.script)
    members = list(found.run.members.values())
    lost, repeated = samples_amiss(members, setting.order, setting.steps)
    digests = {m.digest for m in members if m.digest is not None}
    return {
        "digest_equal": digests == {reference.digest},
        "steps_lost": steps_lost(members) + len(uncommitted(members, setting.steps)),
        "samples_lost": lost,
        "samples_repeated": repeated,
        **nodes.figures(found, runs=setting.runs),
    }


def _peers_setting(setting: Setting) -> peers.Setting:
    return peers.Setting(members=MEMBERS, micro_batch_size=setting.order.micro_batch_size)


def measured(folder: Path, setting: Setting, *, draw: bool) -> dict[str, Any]:
    """The storm and its reference."""
    script = setting.script
    found = storm(
        folder / "storm", script, members=MEMBERS, steps=setting.steps, kills=setting.kills, seed=setting.seed
    )
    reference = reference_of(folder / "alone", script)
    losses = losses_of(found, setting)
    show(losses, [rejoin for name in found.run.replaces if (rejoin := rejoin_of(found.run, name)) is not None])
    if losses and draw:
        plot(ROOT / "experiments/recovery/results/recovery.png", found.run, losses[len(losses) // 2])
    return figures(found, reference, setting)


def struck(folder: Path, *, quick: bool, sofar: bool) -> dict[str, Any]:
    """The matrix of phases and members; `sofar` is whether all digests were equal before it."""
    cells = matrix.quick(folder) if quick else matrix.full(folder)
    equal = all(cell.held for cell in cells)
    return {
        "digest_equal": sofar and equal,
        "matrix_cells": len(cells),
        "matrix_failed": sum(not c.held for c in cells),
    }


if __name__ == "__main__":
    sys.exit(main())
