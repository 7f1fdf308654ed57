"""`make demo`: three nodes train a small GPT; a worker is killed, then a whole node; both come back, no bit differs.

Starts the job, shows it, runs the undisturbed job of one, prints the proof. Exit code 1 if the proof fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from elastrain.job.batch import DataOrder
from experiments import timeline
from experiments.demo import story
from experiments.demo.screen import LiveScreen, PlainScreen, Screen, print_proof
from experiments.harness import ROOT
from experiments.jobs import TRAIN_GPT, Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import Follower, Member, Run, read_member
from experiments.recovery.figures import loss_curve

NODES = 3
"""Simulated ones, of one worker each."""
FAULTS = ("kill --target member:m1 --at step=3,phase=backward", "kill --target node:node2 --at step=16,phase=commit")
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEED = 128, 8, 0
LOOK_EVERY_S = 0.25
STILL_S = 300.0
"""A job without a step for so long is given up; on a busy machine all of it may take much longer."""
PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps; at least 20")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / time.strftime("demo-%Y%m%d-%H%M%S"))
    args = parser.parse_args()
    if args.steps < 20:
        parser.error(f"--steps must be at least 20, so that both faults strike; got {args.steps}")
    unwind_on_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    return demonstrate(console, args.run_dir.absolute(), steps=args.steps)


def demonstrate(console: Console, folder: Path, *, steps: int) -> int:
    console.print(
        "[bold]elastrain[/bold]  three nodes train a small GPT; a worker and a node are killed; nothing is lost"
    )
    script = Script(path=TRAIN_GPT, args=("--steps", str(steps), "--seed", str(SEED)))
    screen: Screen = LiveScreen(console) if console.is_terminal else PlainScreen(console)
    try:
        run, printed = elastic_job(folder, script, screen, steps=steps)
        reference, reference_printed = reference_job(folder / "alone", script, screen, run, steps=steps)
    except RuntimeError as error:
        screen.close()
        console.print(str(error), style="red", highlight=False, markup=False)
        return 1
    screen.close()
    held_out = held_out_of(printed), held_out_of(reference_printed)
    claims = story.proof(run, reference, data_order(), steps=steps, held_out=held_out)
    print_proof(console, claims)
    console.print(f"plot     {plot(folder / 'demo.png', run, reference)}", soft_wrap=True, highlight=False)
    console.print(f"journals {folder}", soft_wrap=True, highlight=False)
    return 0 if all(claim.holds is not False for claim in claims) else 1


def elastic_job(folder: Path, script: Script, screen: Screen, *, steps: int) -> tuple[Run, str]:
    """The nodes and their losses. Raises RuntimeError if the job does not end well."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = folder / "faults"
    faults.write_text("".join(f"{line}\n" for line in FAULTS))
    follower = Follower(folder)
    with elastic(folder, script, members=NODES, nodes=NODES, options=("--faults", str(faults))) as process:

        def look() -> int:
            run = follower.look()
            screen.show(run, steps=steps, note="" if run.views else "the processes start")
            return sum(len(member.passed) for member in run.members.values())

        _until_end(process, look)
        printed = finish(process, folder, timeout_s=1.0)
    screen.show(follower.look(), steps=steps)
    return follower.run, printed


def reference_job(folder: Path, script: Script, screen: Screen, run: Run, *, steps: int) -> tuple[Member, str]:
    """The same script under plain `python`, with nobody to lose."""
    screen.show(run, steps=steps, note="now the undisturbed job of one, for comparison…")
    with alone(folder, script) as process:

        def look() -> int:
            done = len(read_member(folder).advanced_s)
            screen.show(run, steps=steps, note=f"the undisturbed job of one: step {done} of {steps}")
            return done

        _until_end(process, look)
        printed = finish(process, folder, timeout_s=1.0)
    return read_member(folder), printed


def _until_end(process: subprocess.Popen[bytes], look: Callable[[], int]) -> None:
    """Until the process has ended, or `look`, which counts steps, has seen no further one for STILL_S."""
    seen, moved_s = -1, time.monotonic()
    while process.poll() is None and time.monotonic() < moved_s + STILL_S:
        done = look()
        if done != seen:
            seen, moved_s = done, time.monotonic()
        time.sleep(LOOK_EVERY_S)


def held_out_of(printed: str) -> str:
    """The last held-out loss that a training script printed, as it was printed."""
    found = re.findall(r"held-out loss ([\d.]+)", printed)
    return str(found[-1]) if found else "none"


def data_order() -> DataOrder:
    from experiments.train_gpt.data import Windows  # imports torch: only once the training is over
    from experiments.train_gpt.model import SIZES

    return DataOrder(
        dataset_size=len(Windows("train", context=SIZES["tiny"].context)),
        global_batch_size=GLOBAL_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        seed=SEED,
    )


def plot(path: Path, run: Run, reference: Member) -> Path:
    """Loss above, members below, on one time axis."""
    drawn, (above, below) = timeline.figure(2, heights=(3, 2))
    origin_s = run.views[0].at_s
    curve = loss_curve(run.members.values())
    undisturbed = {passed.step: passed.loss for passed in reference.passed}
    times = [at_s - origin_s for at_s, _, _ in curve]
    above.plot(
        times,
        [loss for *_, loss in curve],
        color=timeline.FORWARD_STEPS[0],
        label="three nodes, a worker and a node killed",
    )
    same = [undisturbed.get(step) for _, step, _ in curve]
    above.plot(times, same, "o", fillstyle="none", color="black", markersize=5, label="undisturbed, one worker")  # type: ignore[arg-type]
    for name, at_s in story.kill_times_s(run).items():
        above.axvline(at_s - origin_s, color=timeline.LOST, linewidth=1)
        above.annotate(
            f" {story.what_was_killed(run, name)}\n killed in {run.members[name].faults[0].phase}",
            (at_s - origin_s, max(loss for *_, loss in curve)),
            va="top",
            color=timeline.LOST,
        )
    above.set_ylabel("loss")
    above.legend(frameon=False)
    names = sorted(run.members, key=lambda name: (len(name), name))
    timeline.members(below, run, names, origin_s=origin_s)
    timeline.kills(below, names, story.kill_times_s(run), origin_s=origin_s)
    below.set_xlim(left=-1)
    below.set_xlabel("seconds since training began")
    return timeline.save(drawn, path)


if __name__ == "__main__":
    sys.exit(main())
