"""Policies after losses and slowdowns, played on the planner's timeline: all figures are modelled.

python -m experiments.pipeline.policies [--quick] [--record]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.planner.bounds import Divisible, whole_cuts
from elastrain.pipeline.planner.line_ups import re_routed, survivors
from elastrain.pipeline.planner.plan_choice import PlanQuestion, choose_plan
from elastrain.pipeline.planner.plan_room import PlanMemory
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.step_profile import BlockSeconds, JobProfile, StepRates
from elastrain.pipeline.planner.timeline import Timeline
from elastrain.pipeline.planning import one_f_one_b
from experiments import plots
from experiments.harness import Reach, add_record_flag, record, report

LAYOUTS = (
    *((6, 2), (4, 3), (3, 4), (2, 6)),
    *((6, 4), (4, 6), (3, 8), (2, 12)),
    *((6, 8), (4, 12), (3, 16)),
    *((24, 4), (12, 8), (6, 16)),
)
"""Pipelines, members of each."""
NARROW = 4
"""Layouts with at most so many pipelines count as narrow."""
MORE = (0, 2, 6)
"""In-flight limits that every policy may choose from, as so many more than 1F1B. Ours has 0, 1, 2, 4 and 8."""
UNIT_BYTES = 100_000
"""Bytes of the parameters of a block. Boundary tensors have one byte each here, and fit into half a block."""
PICTURE = Path(__file__).parent / "results" / "policies.png"
REACHES = {
    "vs_recycle": Reach(limit=1.30, at_least=True),
    "vs_recycle_min": Reach(limit=1.0, at_least=True),
    "vs_torchft": Reach(limit=1.55, at_least=True),
    "vs_torchft_min": Reach(limit=1.0, at_least=True),
    "vs_recycle_narrow": Reach(limit=1.47, at_least=True),
    "vs_torchft_narrow": Reach(limit=1.73, at_least=True),
    "vs_recycle_published": Reach(limit=1.20, at_least=True),
    "vs_torchft_published": Reach(limit=1.70, at_least=True),
    "vs_oobleck_min": Reach(limit=1.0, at_least=True),
    "linear": Reach(limit=0.98, at_least=True),
    "linear_min": Reach(limit=0.92, at_least=True),
    "vs_recycle_slow": Reach(limit=1.65, at_least=True),
    "linear_slow": Reach(limit=0.95, at_least=True),
    "plan_s_96": Reach(limit=0.1),
    "plan_s_1000": Reach(limit=0.5),
    "plan_s_10000": Reach(limit=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model: its blocks' seconds of forward, and the seconds that a boundary tensor takes from member to member."""

    name: str
    forward_s: tuple[float, ...]
    hop_s: float = 0.0

    @cached_property
    def graph(self) -> BlockGraph:
        n = len(self.forward_s)
        return BlockGraph(blocks=tuple(f"b{i}" for i in range(n)), flops=(1,) * n, crossings=((),) * (n + 1))

    def profile(self, speeds: Mapping[str, float]) -> JobProfile:
        n = len(self.forward_s)
        inner = (0, *[1] * (n - 1), 0)
        link = 1 / self.hop_s if self.hop_s else 1e15
        free = StepRates(
            inside_bytes_per_s=link, between_bytes_per_s=link, reduce_bytes_per_s=1e15, publish_bytes_per_s=1e15
        )
        return JobProfile(
            blocks=tuple(BlockSeconds(forward_s=s, input_gradient_s=s, weight_gradient_s=s) for s in self.forward_s),
            activation_bytes=inner,
            gradient_bytes=inner,
            parameter_bytes=(UNIT_BYTES,) * n,
            speeds=speeds,
            rates=free,
            # The model has no noise, so every gain counts.
            noise=0.0,
        )


def transformer(name: str, layers: int, head: float) -> Shape:
    """A layer takes 1 s forward. An embedding looks up; a head costs as its share of a layer's parameters."""
    return Shape(name=name, forward_s=(0.05, *[1.0] * layers, head), hop_s=0.1)


EVEN = Shape(name="even", forward_s=(1.0,) * 40)
SHAPES = (EVEN, transformer("7B", 32, 0.65), transformer("13B", 40, 0.52), transformer("70B", 80, 0.31))


@dataclass(frozen=True, kw_only=True)
class Case:
    """An event in a layout: members that are lost, or that go on at half speed."""

    shape: Shape
    pipelines: int
    length: int
    runs_each: int
    """Runs of a pipeline, in units of its members."""
    struck: frozenset[str]
    is_slow: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(f"m{i}" for i in range(self.pipelines * self.length))

    @property
    def left(self) -> tuple[str, ...]:
        return self.members if self.is_slow else tuple(m for m in self.members if m not in self.struck)

    @property
    def runs(self) -> int:
        return self.pipelines * self.length * self.runs_each

    @property
    def speeds(self) -> Mapping[str, float]:
        return dict.fromkeys(self.struck, 0.5) if self.is_slow else {}

    @cached_property
    def memory(self) -> PlanMemory:
        """A member has room for 1.5 × its share of blocks, and at least for its blocks in the even plan."""
        n = len(self.shape.forward_s)
        most = max(end - begin for begin, end in self.even_plan().pipelines[0].stretches(n).values())
        room = max(math.ceil(1.5 * n / self.length), most)
        return PlanMemory(limits_bytes=dict.fromkeys(self.members, room * UNIT_BYTES + UNIT_BYTES // 2))

    def even_plan(self, more: int = 0, *, is_split: bool = True) -> PipelinePlan:
        """Every pipeline alike, cut at whole blocks, with 1F1B's limits and so many more."""
        n, cuts = len(self.shape.forward_s), self.cuts(self.length)
        limits = tuple(limit + more for limit in one_f_one_b(self.length))
        chains = [self.members[at : at + self.length] for at in range(0, len(self.members), self.length)]
        share = self.runs // self.pipelines
        pipelines = tuple(
            Pipeline(members=chain, cuts=cuts, share=share, limits=limits, is_split=is_split) for chain in chains
        )
        return PipelinePlan(blocks=n, pipelines=pipelines)

    def cuts(self, length: int) -> tuple[int, ...]:
        n = len(self.shape.forward_s)
        seconds = tuple(sum(self.shape.forward_s[:end]) for end in range(n + 1))
        divisible = Divisible(points=tuple(range(n + 1)), seconds=seconds)
        found = whole_cuts(divisible, [1.0] * length, lambda place, begin, end: True)
        assert found is not None
        return found

    def timeline(self) -> Timeline:
        return Timeline(StepCosts(profile=self.shape.profile(self.speeds)))


def re_route(case: Case, more: Sequence[int] = MORE, *, is_staggered: bool = False) -> float:
    """ReCycle: the runs of a lost member go to its peers in other pipelines. It does not see slow members."""
    found = []
    for each in more:
        plan = re_routed(case.even_plan(each), case.left)
        if plan is None:
            return math.inf
        timeline = case.timeline()
        if is_staggered:
            # Without a barrier between steps a step costs what one more of them adds.
            found.append(timeline.step_s(times(plan, 3)) - timeline.step_s(times(plan, 2)))
        else:
            found.append(timeline.step_s(plan))
    return min(found)


def times(plan: PipelinePlan, steps: int) -> PipelinePlan:
    """The runs of several steps as if they were those of one."""
    return replace(plan, pipelines=tuple(replace(each, share=each.share * steps) for each in plan.pipelines))


def drop(case: Case, more: Sequence[int] = MORE, *, is_split: bool = True) -> float:
    """TorchFT: a pipeline that lost a member leaves; the others share its runs. It does not see slow members."""
    timeline = case.timeline()
    found = []
    for each in more:
        plan = case.even_plan(each, is_split=is_split)
        whole = [pipeline for pipeline in plan.pipelines if set(case.left) >= set(pipeline.members)]
        if not whole:
            return math.inf
        base, rest = divmod(case.runs, len(whole))
        shared = tuple(replace(pipeline, share=base + (at < rest)) for at, pipeline in enumerate(whole))
        found.append(timeline.step_s(replace(plan, pipelines=shared)))
    return min(found)


def templates(case: Case) -> float:
    """Oobleck, idealised: a broken pipeline is one of a template of its length, at once; runs go by speed."""
    chains = survivors(case.even_plan(), case.left)
    limit = case.memory.limits_bytes["m0"] // UNIT_BYTES
    n, timeline, found = len(case.shape.forward_s), case.timeline(), []
    stretches = {len(chain): _stretches(case, len(chain)) for chain in chains}
    if max(end - begin for each in stretches.values() for begin, end in each) > limit:
        return math.inf
    heaviest = {k: max(sum(case.shape.forward_s[a:b]) for a, b in each) for k, each in stretches.items()}
    shares = [0] * len(chains)
    for _ in range(case.runs):
        shares[min(range(len(chains)), key=lambda i: (shares[i] + 1) * heaviest[len(chains[i])])] += 1
    for more in MORE:
        pipelines = tuple(
            Pipeline(
                members=chain,
                cuts=case.cuts(len(chain)),
                share=share,
                limits=tuple(limit + more for limit in one_f_one_b(len(chain))),
            )
            for chain, share in zip(chains, shares, strict=True)
        )
        found.append(timeline.step_s(PipelinePlan(blocks=n, pipelines=pipelines)))
    return min(found)


def _stretches(case: Case, length: int) -> list[tuple[int, int]]:
    points = (0, *case.cuts(length), len(case.shape.forward_s))
    return list(pairwise(points))


def before(case: Case) -> PipelinePlan:
    """Our own best plan of the undisturbed job."""
    question = PlanQuestion(
        members=case.members,
        graph=case.shape.graph,
        profile=case.shape.profile({}),
        runs=case.runs,
        memory=case.memory,
        pipelines=case.pipelines,
    )
    return choose_plan(question).plan


def asked(case: Case, present: PipelinePlan) -> PlanQuestion:
    """The question after the event."""
    return PlanQuestion(
        members=case.left,
        graph=case.shape.graph,
        profile=case.shape.profile(case.speeds),
        runs=case.runs,
        present=present,
        memory=case.memory,
    )


def ours(case: Case, present: PipelinePlan) -> float:
    """The step of the plan that the planner chooses after the event, as the timeline plays it."""
    return case.timeline().step_s(choose_plan(asked(case, present)).plan)


def played(case: Case) -> dict[str, Any]:
    """The step times of all policies after the event, in units of ours."""
    present = before(case)
    undisturbed_s = replace(case, struck=frozenset()).timeline().step_s(present)
    ours_s = ours(case, present)
    capacity = sum(case.speeds.get(m, 1.0) for m in case.left)
    found: dict[str, Any] = {
        "pipelines": case.pipelines,
        "struck": len(case.struck),
        "linear": undisturbed_s / ours_s * len(case.members) / capacity,
        "recycle": re_route(case) / ours_s,
    }
    if case.is_slow:
        return found
    plain = replace(case, struck=frozenset()).timeline().step_s(case.even_plan(is_split=False))
    return found | {
        "torchft": drop(case) / ours_s,
        "oobleck": templates(case) / ours_s,
        "recycle_published": re_route(case, (2,), is_staggered=True) / ours_s,
        "torchft_published": drop(case, (0,), is_split=False) / ours_s,
        "recycle_absorbs": plain / re_route(case, (2,)) if len(case.struck) == 1 else math.inf,
    }


def cases(shapes: Sequence[Shape], seeds: int, *, is_slow: bool = False) -> Iterator[Case]:
    """All layouts, with two and four runs for each member, and 1, 2 or 3 to 8 members struck at random."""
    rng = random.Random(7)
    for shape in shapes:
        for pipelines, length in LAYOUTS:
            for runs_each in (2, 4):
                for _ in range(seeds):
                    for struck in (1, 2, rng.randint(3, min(8, max(3, pipelines * length // 4)))):
                        members = [f"m{i}" for i in range(pipelines * length)]
                        yield Case(
                            shape=shape,
                            pipelines=pipelines,
                            length=length,
                            runs_each=runs_each,
                            struck=frozenset(rng.sample(members, struck)),
                            is_slow=is_slow,
                        )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def possible(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of the cases in which the policy can go on."""
    return [row[key] for row in rows if key in row and math.isfinite(row[key])]


def plan_s(members: int, length: int, blocks: int, lost: int) -> float:
    """Seconds of one choice on one core, with the memory check."""
    case = Case(
        shape=Shape(name="even", forward_s=(1.0,) * blocks),
        pipelines=members // length,
        length=length,
        runs_each=2,
        struck=frozenset(random.Random(1).sample([f"m{i}" for i in range(members)], lost)),
    )
    question = asked(case, before(case))
    begun_s = time.process_time()
    choose_plan(question)
    return time.process_time() - begun_s


def figures_of(lost: Sequence[Mapping[str, Any]], slow: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    narrow = [row for row in lost if row["pipelines"] <= NARROW]
    found = {"linear": geometric_mean(possible(lost, "linear")), "linear_min": min(possible(lost, "linear"))}
    for name in ("recycle", "torchft", "oobleck", "recycle_published", "torchft_published"):
        values = possible(lost, name)
        found[f"vs_{name}"], found[f"vs_{name}_min"] = geometric_mean(values), min(values, default=math.nan)
        found[f"cannot_go_on_{name}"] = len(lost) - len(values)
    for name in ("recycle", "torchft"):
        found[f"vs_{name}_narrow"] = geometric_mean(possible(narrow, name))
    found["recycle_absorbs_min"] = min(possible(lost, "recycle_absorbs"), default=math.nan)
    found["recycle_absorbs"] = geometric_mean(possible(lost, "recycle_absorbs"))
    found["vs_recycle_slow"] = geometric_mean(possible(slow, "recycle"))
    found["vs_recycle_slow_min"] = min(possible(slow, "recycle"))
    found["linear_slow"] = geometric_mean(possible(slow, "linear"))
    return found


def table(rows: Sequence[Mapping[str, Any]], by: Callable[[Mapping[str, Any]], str]) -> Iterator[str]:
    """Geometric mean, minimum and maximum of each policy over ours, by groups of cases."""
    groups = sorted({by(row) for row in rows})
    for group in groups:
        its = [row for row in rows if by(row) == group]
        cells = []
        for name in ("recycle", "torchft", "oobleck", "linear"):
            values = possible(its, name)
            if values:
                cells.append(f"{name} {geometric_mean(values):.3f} ({min(values):.2f} to {max(values):.2f})")
        yield f"{group:<24} {len(its):>4} cases: {'; '.join(cells)}"


def width(row: Mapping[str, Any]) -> str:
    return f"{row['pipelines']:>2} pipelines"


def strikes(row: Mapping[str, Any]) -> str:
    return f"{min(row['struck'], 3)}{' or more' if row['struck'] > 2 else ''} struck"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.pipeline.policies", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two shapes, one draw of members for each case")
    add_record_flag(parser)
    args = parser.parse_args()
    shapes, seeds = ((EVEN, SHAPES[1]), 1) if args.quick else (SHAPES, 3)
    rows = {shape.name: [played(case) for case in cases([shape], seeds)] for shape in shapes}
    lost = [row for each in rows.values() for row in each]
    slow = [played(case) for case in cases(shapes[:1] if args.quick else shapes, 1, is_slow=True)]
    for name, its in {**rows, "slow": slow}.items():
        print(name)
        for by in (lambda row: "all", width, strikes):
            for line in table(its, by):
                print(f"  {line}")
    figures = figures_of(lost, slow)
    figures |= {"plan_s_96": max(plan_s(96, 8, 40, 3), plan_s(96, 16, 40, 3)), "plan_s_1000": plan_s(1000, 10, 40, 8)}
    figures |= {"plan_s_10000": plan_s(10_000, 16, 64, 100)}
    if args.record:
        record("pipeline", figures, quick=args.quick, settings={"policies": True, "shapes": [s.name for s in shapes]})
        grouped = {"re-route": possible(lost, "recycle"), "drop": possible(lost, "torchft")}
        grouped |= {"templates": possible(lost, "oobleck"), "linear": possible(lost, "linear")}
        plots.bars(PICTURE, grouped, label="step time over ours", title="After losses, modelled")
    return 0 if report(figures, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
