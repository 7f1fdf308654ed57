"""The planner in paced jobs: what its plans gain over others, and how near its predictions are. For `run.py --planner`.

Each job is told its plans (`steering.py`), and computes by them as any job does: processes, kills, moves and bits are
real, and the length of computing is stated. All plans of one question meet the same losses and slow members.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import PipelinePlan, routes
from elastrain.pipeline.planner.line_ups import re_routed
from elastrain.pipeline.planner.plan_choice import PlanQuestion, choose_plan
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.step_profile import BlockSeconds, JobProfile, StepRates
from elastrain.pipeline.planner.timeline import PlayedStep, Timeline, play
from elastrain.pipeline.planning import PlanWish, first_plan, next_plan
from experiments.harness import Reach
from experiments.jobs import Script, elastic, finish
from experiments.pipeline import migration, train
from experiments.pipeline.figures import actions, passed_s, step_lengths_s
from experiments.pipeline.migration import Move, moves
from experiments.pipeline.steering import Steering, profile
from experiments.pipeline.told import Told, told

BLOCKS, WINDOW_S = train.BLOCKS, 0.04
OWN_STEPS = 10
"""Steps of a job whose planner decides: it has measured after five, and its plan holds from the sixth or seventh on."""
AT_ONCE = 3
"""Paced jobs that run beside one another: they sleep nine tenths of their time."""
LOST_IN = 2
"""The step in which members are lost."""
CALIBRATION_WINDOW_S, CALIBRATION_STEPS = 0.02, 8
ROWS = 1024
WAIT_S = 150.0
REACHES = {
    "plan_gain": Reach(limit=1.5, at_least=True),
    "rule_gain": Reach(limit=1.12, at_least=True),
    "linear_real": Reach(limit=0.97, at_least=True),
    "slow_member_gain": Reach(limit=1.55, at_least=True),
    "slow_link_gain": Reach(limit=1.25, at_least=True),
    "split_gain": Reach(limit=1.16, at_least=True),
    "model_error": Reach(limit=0.05),
    "fits_after_losses": Reach(limit=1.0, at_least=True),
    "migration_stall_ratio": Reach(limit=0.1),
    "migration_stall": Reach(limit=0.03),
    "vs_torch_pipelining": Reach(limit=1.0),
}
NOT_MEASURED = {
    "migration_stall_ratio": "with --moves only: nothing may run beside these jobs",
    "migration_stall": "as migration_stall_ratio",
    "fits_after_losses": "only without --quick: the smallest limit is found by a dozen jobs, one after the other",
}
GRAPH = BlockGraph(
    blocks=tuple(f"layers.{place}" for place in range(BLOCKS)), flops=(1,) * BLOCKS, crossings=((),) * (BLOCKS + 1)
)


def members(count: int) -> tuple[str, ...]:
    return tuple(f"m{number}" for number in range(count))


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The parts of a paced job's profile: stated windows, and the times measured beside them."""

    beside_s: float = 0.0
    """Seconds of a block's window beyond what is stated."""
    action_s: float = 0.0
    step_s: float = 0.0
    message_s: float = 0.0
    """Seconds from the end of an action to the moment when another member has its result."""

    def profile(self, case: Case) -> JobProfile:
        seconds = case.window_s + self.beside_s
        block = BlockSeconds(forward_s=seconds, input_gradient_s=seconds, weight_gradient_s=seconds)
        # A link that holds each tensor for as long as a member's forward: one byte each, and the rate that follows.
        hold_s = 2 * case.window_s
        inner, last = (0, *[1] * (BLOCKS - 1), 0), members(case.count)[-2:]
        links = ((*last, 1 / hold_s),) if case.has_slow_link else ()
        rates = StepRates(action_s=self.action_s, step_s=self.step_s, message_s=self.message_s, links=links)
        return JobProfile(
            blocks=(block,) * BLOCKS,
            activation_bytes=inner,
            gradient_bytes=inner,
            parameter_bytes=(0,) * BLOCKS,
            speeds={case.slow: 0.5} if case.slow else {},
            rates=rates,
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job: its plan, and what it meets."""

    name: str
    count: int
    """Members."""
    plan: PipelinePlan
    after: PipelinePlan | None = None
    """The plan without the lost member."""
    lost: str = ""
    slow: str = ""
    """The member that computes at half speed."""
    has_slow_link: bool = False
    """True if the link of the last member holds each boundary tensor for as long as a member's forward."""
    is_own: bool = False
    """True if the job's own planner decides, once it has measured. The first plan is the rule's."""
    window_s: float = WINDOW_S
    steps: int = 2

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments that change bits."""
        rows = ("--rows", str(ROWS)) if self.has_slow_link else ()
        return ("--steps", str(self.steps), "--micro-batches", str(self.plan.runs), *rows)

    @property
    def faults(self) -> list[str]:
        found = [f"kill --target member:{self.lost} --at step={LOST_IN},phase=forward"] if self.lost else []
        if self.slow:
            found.append(f"slow --target member:{self.slow} --at step=0,phase=forward --factor 2 --how sleep")
        if self.has_slow_link:
            # Its cable leads to one neighbour in the pipeline only. A sample's elements are floats of 4 bytes.
            size_bits = 8 * 4 * train.SIZE * ROWS * train.WIDTH
            rate = size_bits / (2 * self.window_s) / 1e6
            found.append(f"slow-link --target node:node{self.count - 1} --at t=3 --for 600 --rate {rate:.4g}")
        return found


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A job that has run."""

    case: Case
    told: Told

    @property
    def is_valid(self) -> bool:
        return statistics.mean(self.told.overshoots_s) <= 0.02 * self.case.window_s

    def step_s(self, *, after: bool = False) -> float:
        """The median step by the plan, or by that without the lost member."""
        lengths = [step_lengths_s(lines) for m, lines in self.told.journals.items() if m != self.case.lost]
        last = self.case.steps - 1
        counted = range(LOST_IN + 1, last + 1) if after else range(1, LOST_IN if self.case.lost else last + 1)
        if self.case.is_own:
            counted = range(last - 1, last + 1)
        return statistics.median(each[step] for each in lengths for step in counted if step in each)


def modelled_s(case: Case, costs: Costs, *, after: bool = False) -> float:
    """The timeline's seconds of a step."""
    plan = case.after if after else case.plan
    assert plan is not None
    return Timeline(StepCosts(profile=costs.profile(case))).step_s(plan)


def ruled(count: int, stages: int, runs: int, *, is_split: bool = True) -> PipelinePlan:
    """The rule's first plan: even cuts, the limits of 1F1B."""
    return with_split(first_plan(GRAPH, members(count), PlanWish(stages=stages, runs=runs)), is_split=is_split)


def with_split(plan: PipelinePlan, *, is_split: bool) -> PipelinePlan:
    """The same plan, with backwards that are all split or all whole."""
    return replace(plan, pipelines=tuple(replace(each, is_split=is_split) for each in plan.pipelines))


def planned(case: Case, *, alive: Sequence[str] | None = None, chain: bool = True) -> PipelinePlan:
    """The planner's choice for a case, over the members that are alive. `chain`: one pipeline of all of them."""
    its = tuple(alive or members(case.count))
    question = PlanQuestion(
        members=its,
        graph=GRAPH,
        profile=Costs().profile(case),
        runs=case.plan.runs,
        present=case.plan,
        least_members=len(its) if chain else 2,
    )
    return choose_plan(question).plan


def pairs(*, quick: bool) -> dict[str, list[Case]]:
    """Row -> its jobs. The figure of a row is a ratio of two of them, or the worst of several."""
    # A step that counts by each plan, or three.
    more = 0 if quick else 2
    two = ruled(6, 3, 12)
    loss = partial(Case, count=6, plan=two, lost="m1", steps=LOST_IN + 2 + more)
    alive = tuple(member for member in members(6) if member != "m1")
    rule = with_split(next_plan(GRAPH, two, alive, PlanWish(stages=3, runs=12)), is_split=False)
    base = loss(name="loss")
    after = {"re-routed": re_routed(two, alive), "rule": rule, "planned": planned(base, alive=alive, chain=False)}
    found = {"loss": [loss(name=f"loss, {name}", after=plan) for name, plan in after.items()]}
    found["linear"] = []
    for count in (4, 5, 6):
        undisturbed = planned(Case(name="", count=count, plan=ruled(count, count, 16)))
        case = Case(
            name=f"{count} members, one lost", count=count, plan=undisturbed, lost="m1", steps=LOST_IN + 2 + more
        )
        alive = tuple(member for member in members(count) if member != "m1")
        found["linear"].append(replace(case, after=planned(case, alive=alive)))
    for slow in members(4):
        today = Case(
            name=f"slow {slow}, today", count=4, plan=ruled(4, 4, 8, is_split=False), slow=slow, steps=2 + more
        )
        found[f"slow {slow}"] = [today, replace(today, name=f"slow {slow}, planned", plan=planned(today))]
    own = Case(name="slow m1, own", count=4, plan=ruled(4, 4, 8), slow="m1", is_own=True, steps=OWN_STEPS)
    lost = Case(name="loss, own", count=6, plan=two, lost="m1", is_own=True, steps=OWN_STEPS + LOST_IN)
    found["own"] = [own] if quick else [own, lost]
    whole = Case(name="whole backwards", count=4, plan=ruled(4, 4, 8, is_split=False), steps=2 + more)
    found["split"] = [whole, replace(whole, name="split", plan=planned(whole))]
    return found


def migration_pairs(*, quick: bool) -> dict[str, tuple[Move, Move]]:
    """Moves of one block over the link of two nodes: to the member that backs it up, and to one of several."""

    def one_more(count: int, cuts: tuple[int, ...]) -> tuple[PipelinePlan, PipelinePlan]:
        before = ruled(count, count, migration.RUNS, is_split=False)
        (line,) = before.pipelines
        return before, replace(before, pipelines=(replace(line, cuts=cuts),))

    found = {"of two": moves(*one_more(2, (5,)), "of two")}
    if quick:
        return found
    alone = moves(*one_more(2, (5,)), "of two, no backups", backups=0)
    return found | {"of two, no backups": alone, "of four": moves(*one_more(4, (2, 5, 6)), "of four")}


def link_cases() -> list[Case]:
    today = Case(
        name="slow link, today",
        count=4,
        plan=ruled(4, 4, 16, is_split=False),
        has_slow_link=True,
    )
    return [today, replace(today, name="slow link, planned", plan=planned(today))]


def calibrations() -> list[Case]:
    shapes = ((2, 2, 6), (3, 3, 8), (4, 2, 8), (4, 4, 6))
    return [
        Case(
            name=f"calibration {count} over {stages}, {runs} runs",
            count=count,
            plan=ruled(count, stages, runs),
            window_s=CALIBRATION_WINDOW_S,
            steps=CALIBRATION_STEPS,
        )
        for count, stages, runs in shapes
    ]


Compared = Callable[[tuple[str, ...], Told], bool]
"""(arguments that change bits, what a job told) -> True if it equals the job of one."""


@dataclass(kw_only=True)
class Jobs:
    """Runs jobs, three at a time."""

    folder: Path
    is_equal: Compared
    start: Callable[..., Any]
    differing: list[str] = field(default_factory=list)

    def run(self, case: Case) -> Measured:
        folder = self.folder / case.name.replace(" ", "-").replace(",", "")
        folder.mkdir(parents=True)
        began_s = time.monotonic()
        steering = Steering(asks=True) if case.is_own else Steering(first=case.plan, after=case.after)
        (folder / "plan.json").write_bytes(msgspec.json.encode(steering))
        (folder / "faults.txt").write_text("\n".join(case.faults) + "\n")
        options = ["--stages", str(max(len(each.members) for each in case.plan.pipelines)), "--max-restarts", "0"]
        options += ["--faults", str(folder / "faults.txt")] if case.faults else []
        options += ["--netns"] if case.has_slow_link else []
        args = (*case.args, "--window-ms", str(1000 * case.window_s), "--plan", str(folder / "plan.json"))
        script = Script(path=Path(train.__file__), args=args)
        nodes = case.count if case.has_slow_link else None
        with elastic(folder, script, members=case.count, nodes=nodes, options=options, start=self.start) as process:
            finish(process, folder, timeout_s=WAIT_S)
        found = Measured(case=case, told=told(folder))
        if not self.is_equal(case.args, found.told):
            self.differing.append(case.name)
        said = "DIFFERS" if case.name in self.differing else "equal"
        sys.stderr.write(f"{case.name}: {said}, {time.monotonic() - began_s:.0f} s\n")
        return found

    def calibrated(self, cases: Sequence[Measured]) -> Costs:
        """Medians of what the jobs of four layouts have measured of themselves, and how long their messages took."""
        profiles = [profile(self.folder / each.case.name.replace(" ", "-").replace(",", "")) for each in cases]
        beside = [
            statistics.median(block.forward_s - each.case.window_s for block in its.blocks)
            for each, its in zip(cases, profiles, strict=True)
        ]
        costs = Costs(
            beside_s=statistics.median(beside),
            action_s=statistics.median(each.rates.action_s for each in profiles),
            step_s=statistics.median(each.rates.step_s for each in profiles),
        )
        return with_messages(costs, [(each.case, each.step_s()) for each in cases])


MOST_MESSAGE_S, MESSAGE_TRIES = 0.01, 50


def with_messages(costs: Costs, measured: Sequence[tuple[Case, float]]) -> Costs:
    """Return the costs with the seconds of a message with which predictions come nearest to these measured steps.

    No member can measure it: it is the time between two processes.
    """

    def missed(tried: Costs) -> float:
        return sum((modelled_s(case, tried) / step_s - 1) ** 2 for case, step_s in measured)

    tries = (replace(costs, message_s=MOST_MESSAGE_S * each / MESSAGE_TRIES) for each in range(MESSAGE_TRIES + 1))
    return min(tries, key=missed)


def measure(jobs: Jobs, draw: Callable[[Measured, PlayedStep], None] | None, *, quick: bool) -> dict[str, Any]:
    """Run all jobs of the rows, and return their figures."""
    rows, link = pairs(quick=quick), link_cases()
    # The longest first, so that the last ones end together.
    first = [*calibrations(), *(case for name, cases in rows.items() for case in cases if name != "own")]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        running: dict[str, Future[Measured]] = {
            case.name: pool.submit(jobs.run, case) for case in [*link, *rows["own"], *first]
        }
        ran: dict[str, Measured] = {}
        for name, future in running.items():
            try:
                ran[name] = future.result()
            except RuntimeError as error:
                sys.stderr.write(f"{name}: {error}\n")
    costs = jobs.calibrated([ran[case.name] for case in calibrations()])
    others = [ran[case.name] for case in first[len(calibrations()) :] if case.name in ran]
    errors = model_errors(others, costs)
    overshoots = {name: statistics.mean(each.told.overshoots_s) / each.case.window_s for name, each in ran.items()}
    if draw is not None:
        split = ran["split"]
        draw(split, played(split.case, costs))
    return {
        **figures(ran, rows),
        "model_error": max(map(abs, errors.values())) if len(errors) >= 12 else None,
        "model_errors": errors,
        "constants": vars(costs),
        "digest_equal": not jobs.differing and len(ran) == len(running),
        "differing": jobs.differing,
        "ended_badly": [name for name in running if name not in ran],
        "overshoot": max(overshoots.values()),
        "is_valid": all(each.is_valid for each in ran.values()),
        "not_valid": {name: round(over, 4) for name, over in overshoots.items() if over > 0.02},
        "not_measured": NOT_MEASURED,
        **dict.fromkeys(NOT_MEASURED),
    }


def figures(ran: Mapping[str, Measured], rows: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """The gains of the rows, each beside what the timeline says without fixed costs."""
    free = Costs()

    def ratio(one: str, other: str, *, after: bool = False) -> tuple[float | None, float | None]:
        if not {one, other} <= ran.keys():
            return None, None
        both = ran[one], ran[other]
        measured, modelled = (
            (each.step_s(after=after) for each in both),
            (modelled_s(each.case, free, after=after) for each in both),
        )
        if any(each.case.is_own for each in both):
            return next(measured) / next(measured), None
        return next(measured) / next(measured), next(modelled) / next(modelled)

    def linear(case: Case) -> tuple[float, float]:
        rest = case.count / (case.count - 1)
        its = ran[case.name]
        before_s, after_s = modelled_s(case, free), modelled_s(case, free, after=True)
        return rest * its.step_s() / its.step_s(after=True), rest * before_s / after_s

    linears = [linear(case) for case in rows["linear"] if case.name in ran]
    slow = [ratio(f"slow {m}, today", f"slow {m}, planned") for m in members(4)]
    found = {
        "plan_gain": ratio("loss, re-routed", "loss, planned", after=True),
        "rule_gain": ratio("loss, rule", "loss, planned", after=True),
        "linear_real": min(linears) if len(linears) == len(rows["linear"]) else (None, None),
        "slow_member_gain": min(slow, key=lambda each: each[0] or 0.0),
        "slow_link_gain": ratio("slow link, today", "slow link, planned"),
        "split_gain": ratio("whole backwards", "split"),
    }
    own = [ratio("slow m1, own", "slow m1, planned"), ratio("loss, own", "loss, planned", after=True)]
    steps = {
        name: [each.step_s(), *([each.step_s(after=True)] if each.case.after else [])] for name, each in ran.items()
    }
    return {
        **{name: measured for name, (measured, _) in found.items()},
        **{f"{name}_modelled": modelled for name, (_, modelled) in found.items()},
        "slow_member_gains": [measured for measured, _ in slow],
        "own_plan_ratios": [measured for measured, _ in own],
        "linears": [measured for measured, _ in linears],
        "steps_s": {name: [round(each, 4) for each in its] for name, its in steps.items()},
    }


def model_errors(ran: Sequence[Measured], costs: Costs) -> dict[str, float]:
    """Layout -> predicted over measured step, less one."""
    found: dict[str, float] = {}
    for each in ran:
        found[each.case.name] = modelled_s(each.case, costs) / each.step_s() - 1
        if each.case.lost:
            found[f"{each.case.name}: after"] = modelled_s(each.case, costs, after=True) / each.step_s(after=True) - 1
    return found


def played(case: Case, costs: Costs) -> PlayedStep:
    """The predicted step of a case, action by action."""
    return play(case.plan, routes(case.plan), StepCosts(profile=costs.profile(case)))


def drawn_actions(measured: Measured) -> list[Any]:
    """The actions of the last step, with times since the step began."""
    step = measured.case.steps - 1
    begun_s = min(passed_s(lines)[step - 1] for lines in measured.told.journals.values())
    done = [each for each in actions(measured.told.journals) if each.step == step]
    return [replace(each, span=(each.span[0] - begun_s, each.span[1] - begun_s)) for each in done]


_MISSING = re.compile(r"limit is (\d+) MiB too small")
_ADVISED = re.compile(r"raise the limit by (\d+) MiB")
FIT_TRIES, FIT_STEPS, FIT_WIDTH, LEAST_MIB = 12, 5, 512, 380


def fits_after_losses(folder: Path, start: Callable[..., Any]) -> dict[str, Any]:
    """Find the smallest limit under which four members fit, by what jobs say is missing; then lose one, and two."""
    limit_mib, tried, found = LEAST_MIB, 0, dict[str, Any]()

    def missing_mib(*lost: tuple[str, int], more_mib: int = 0, said: re.Pattern[str] = _MISSING) -> int | None:
        """0: the job has come to its end. None: it has ended without naming what is missing."""
        nonlocal tried
        tried += 1
        its = folder / f"limit-{tried}"
        its.mkdir(parents=True)
        faults = [f"kill --target member:{member} --at step={step},phase=forward" for member, step in lost]
        (its / "faults.txt").write_text("\n".join(faults) + "\n")
        options = ["--stages", "4", "--max-restarts", "0", "--memory-limit", f"{limit_mib + more_mib}M"]
        options += ["--faults", str(its / "faults.txt")] if lost else []
        args = ("--steps", str(FIT_STEPS), "--micro-batches", "8", "--width", str(FIT_WIDTH), "--backups", "2")
        with elastic(its, Script(path=Path(train.__file__), args=args), members=4, options=options, start=start) as job:
            code = job.wait(timeout=WAIT_S)
        named = said.findall((its / "output.log").read_text())
        sys.stderr.write(f"limit {limit_mib + more_mib} MiB, {len(lost)} lost: {code}, missing {named}\n")
        return 0 if code == 0 else max(map(int, named)) if named else None

    while (missing := missing_mib()) != 0 and tried < FIT_TRIES:
        limit_mib += max(1, missing or 1)
    if missing != 0:
        return {"fits_after_losses": None}
    for name, lost in (("one", (("m1", 1),)), ("two", (("m1", 1), ("m2", 3)))):
        more = found[f"fits_{name}_lost_missing_mib"] = missing_mib(*lost, said=_ADVISED)
        is_named = name == "two" and bool(more) and missing_mib(*lost, more_mib=more or 0) == 0
        found[f"fits_{name}_lost"] = more == 0 or is_named
    return {
        **found,
        "fits_limit_mib": limit_mib,
        "fits_after_losses": found["fits_one_lost"] and found["fits_two_lost"],
    }
