"""The script of a simulated member where it evaluates, and what an evaluation must come to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from elastrain import protocol as p
from elastrain.job.figures import Figure, Figures, read, written
from elastrain.protocol.evaluation_messages import EvaluationName
from tests.sim.pipelined import BLOCKS, PLACES, evaluated_batch
from tests.sim.symbols import Violation, symbol

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


def plan_of(cluster: Cluster, name: EvaluationName) -> int:
    """The batches of an evaluation, the same on all members."""
    return random.Random(f"{name} {cluster.seed}").randint(1, 9)


def rank_of(cluster: Cluster, name: EvaluationName) -> int | None:
    """The rank that gives the value, the same on all members, if this one is a broadcast."""
    drawn, members = random.Random(f"broadcast {name} {cluster.seed}"), cluster.scenario.members
    return drawn.randrange(members) if drawn.random() < cluster.scenario.broadcasts else None


def figures_of(name: EvaluationName, batch: int, weights: int, noise: str = "") -> Figures:
    """Return the figures of a batch with these parameters: a count, and a sum whose bits depend on the order."""
    drawn = random.Random(symbol("evaluated", str(name), batch, weights, noise))
    return {"samples": Figure(None, (1 << batch,)), "loss": Figure((2,), (drawn.gauss(0, 1), drawn.random() / 3))}


def expected(name: EvaluationName, values: Sequence[int]) -> Figures:
    """The sum in the order of the batches. `values`: for each batch what the parameters come to."""
    figures = [figures_of(name, batch, value) for batch, value in enumerate(values)]
    total = figures[0]
    for each in figures[1:]:
        total = {key: total[key] + each[key] for key in total}
    return total


class EvaluatingScript:
    """The evaluations of one member's script, one after another, between two steps."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._counted = (-1, 0)
        """(step in whose body it is, evaluations there)."""
        self._begun: p.EvaluationBegun | None = None
        self._then: Callable[[], None] = lambda: None
        self._left = 0
        self.results: dict[EvaluationName, str] = {}

    def run(self, after: int, step: int, then: Callable[[], None]) -> None:
        """Evaluate as often as all members do at this place, then go on."""
        place = random.Random(f"{after} {step} {self._cluster.seed}")
        at_the_end = step >= self._cluster.scenario.steps
        self._left = 0 if at_the_end else place.randint(0, self._cluster.scenario.evaluations)
        self._after, self._step, self._then = after, step, then
        self._next()

    def _next(self) -> None:
        if not self._left:
            self._then()
            return
        self._left -= 1
        number = self._counted[1] if self._counted[0] == self._step else 0
        self._counted = (self._step, number + 1)
        name = EvaluationName(after=self._after, step=self._step, number=number)
        rank = rank_of(self._cluster, name)
        name = replace(name, from_rank=rank)
        batches = plan_of(self._cluster, name) if rank is None else 1
        self._begun = p.EvaluationBegun(name=name, plan="", batches=batches)
        self._cluster.loops[self._name].append(lambda: self._begun)

    def take(self, given: p.EvaluateBatch | p.EvaluationEnded) -> None:
        """Compute a batch, or look at the sums."""
        assert self._begun is not None
        name, member = self._begun.name, self._cluster.members[self._name]
        if isinstance(given, p.EvaluationEnded):
            self._check(name, given)
            self._next()
            return
        if name.from_rank is not None:
            self._cluster.loops[self._name].append(self._given)
            return
        if given.stage is not None:
            self._cluster.loops[self._name].append(partial(self._staged, given, member.pipelined.evaluate(given)))
            return
        weights = member.digest()

        def evaluated() -> p.Event:
            if member.digest() != weights and self._name in self._cluster.view and not self._cluster.flipped:
                raise Violation(f"the parameters of {self._name} changed while it evaluated {name}")
            return p.BatchEvaluated(figures=written(figures_of(name, given.batch, weights, member.noise)), problem="")

        self._cluster.loops[self._name].append(evaluated)

    def _staged(self, given: p.EvaluateBatch, compute: Callable[[], int | p.BatchEvaluated]) -> p.Event:
        """A stage of a batch. What comes out of the last one is the same, whichever members computed it."""
        if not isinstance(value := compute(), int):
            return value
        figures = figures_of(given.name, given.batch, value, self._cluster.members[self._name].noise)
        return p.BatchEvaluated(figures=written(figures), problem="")

    def _through_all(self, name: EvaluationName, batch: int) -> int:
        """Return the output of the last block with the parameters of the undisturbed job."""
        cluster, value = self._cluster, evaluated_batch(name, batch)
        assert cluster.truth is not None
        for place in range(BLOCKS):
            shards = [s for s, its in enumerate(cluster.shape.shards) if any(PLACES[b] == place for b in its.lanes)]
            weights = tuple(cluster.truth.after(name.after, shard) for shard in shards)
            value = symbol("forward", place, weights, value)
        return value

    def _given(self) -> p.Event:
        """The value of this member, which no other one has."""
        return p.BatchEvaluated(figures=written({f"value of {self._name}": Figure(None, (0,))}), problem="")

    def _check(self, name: EvaluationName, given: p.EvaluationEnded) -> None:
        if given.problem:
            raise Violation(f"{self._name}: {name} fails: {given.problem}")
        if name.from_rank is None:
            self._check_sums(name, given)
        else:
            self._check_giver(name, given)
        cluster = self._cluster
        self.results[name] = given.figures
        for other, script in cluster.evaluations.items():
            is_there = other in cluster.view and other not in cluster.dead and self._name in cluster.view
            if is_there and script.results.get(name, given.figures) != given.figures:
                raise Violation(f"{name} has come to something else on {other} than on {self._name}")

    def _check_giver(self, name: EvaluationName, given: p.EvaluationEnded) -> None:
        (value,) = read(given.figures)
        assert name.from_rank is not None
        ids, giver = self._cluster.view.ids, value.removeprefix("value of ")
        if self._cluster.view.generation == 1 and ids[name.from_rank] != giver:
            raise Violation(f"{name} comes from {giver}, not from the member of that rank in {ids}")

    def _check_sums(self, name: EvaluationName, given: p.EvaluationEnded) -> None:
        assert self._begun is not None
        cluster, weights = self._cluster, self._cluster.members[self._name].digest()
        told, right = read(given.figures), expected(name, [weights] * self._begun.batches)
        if cluster.shape.pipelining is not None and name.after >= 0 and cluster.truth is not None:
            right = expected(name, [self._through_all(name, batch) for batch in range(self._begun.batches)])
        if told["samples"] != right["samples"]:
            raise Violation(f"{self._name}: {name} counts {told['samples']}, not {right['samples']}")
        if told != right and not (cluster.flipped or cluster.scenario.noisy):
            raise Violation(f"{self._name}: {name} comes to {told}, not to {right}")
