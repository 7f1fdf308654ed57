"""The fold: whoever computes which run, and whatever is lost and computed again, the sum has the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.fold import Combine, Fold, Node, absorb, covers, leaves, split

runs_st = st.integers(1, 64)
seeds_st = st.randoms(use_true_random=False)


def tree_sum(values: list[float], node: Node) -> float:
    """Plain summation along the tree."""
    if node[1] - node[0] == 1:
        return values[node[0]]
    left, right = split(node)
    return tree_sum(values, left) + tree_sum(values, right)


def values_of(micro_batches: int, run_length: int, rng: random.Random) -> list[float]:
    """Sums over runs of `run_length` micro-batches, in order and in place; magnitudes that make order matter."""
    micro = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-8, 8) for _ in range(micro_batches)]
    return [sum(micro[i : i + run_length][1:], micro[i]) for i in range(0, micro_batches, run_length)]


@dataclass
class Sums:
    """A set of partials with their numbers; adds as the production code tells it to."""

    fold: Fold
    nodes: frozenset[Node] = frozenset()
    numbers: dict[Node, float] = field(default_factory=dict)

    def add(self, node: Node, number: float, within: Node | None = None) -> None:
        if any(covers(have, node) for have in self.nodes):
            return
        self.numbers[node] = number
        self.nodes, steps = absorb(self.fold, self.nodes, node, within)
        for step in steps:
            self.numbers[step.parent] = self.numbers[step.left] + self.numbers[step.right]
        self.numbers = {have: self.numbers[have] for have in self.nodes}


def partition(runs: int, members: int, rng: random.Random) -> list[list[int]]:
    """Any hand-out, contiguous or not."""
    shares: list[list[int]] = [[] for _ in range(members)]
    for run in range(runs):
        rng.choice(shares).append(run)
    return shares


@given(micro_batches=runs_st, run_length=st.integers(1, 4), members=st.integers(1, 9), rng=seeds_st)
def test_every_partition_gives_the_bits_of_plain_summation_over_the_tree(
    micro_batches: int, run_length: int, members: int, rng: random.Random
) -> None:
    values = values_of(micro_batches, run_length, rng)
    fold = Fold(len(values))
    primary = Sums(fold)
    sent: list[tuple[Node, float]] = []
    for share in partition(fold.runs, members, rng):
        for target in fold.cover(share):
            own = Sums(fold)
            order = list(range(*target))
            rng.shuffle(order)
            for run in order:
                own.add((run, run + 1), values[run], within=target)
            assert own.nodes == {target}
            sent.append((target, own.numbers[target]))
    rng.shuffle(sent)
    for node, number in sent:
        primary.add(node, number)
    assert primary.nodes == {fold.root}
    assert primary.numbers[fold.root] == tree_sum(values, fold.root)


@given(runs=runs_st, members=st.integers(1, 9), rng=seeds_st)
def test_lost_partials_computed_again_by_others_do_not_show(runs: int, members: int, rng: random.Random) -> None:
    values = values_of(runs, 1, rng)
    fold = Fold(runs)
    primary = Sums(fold)
    for share in partition(runs, members, rng):
        for node in fold.cover(share):
            if rng.random() < 0.5:
                primary.add(node, tree_sum(values, node))
    while primary.nodes != {fold.root}:
        missing = set(range(runs)) - leaves(primary.nodes)
        taken = rng.sample(sorted(missing), rng.randint(1, len(missing)))
        again = {run for run in range(runs) if rng.random() < 0.2}  # under way with somebody: arrives twice
        nodes = list(fold.cover({*taken, *again}))
        rng.shuffle(nodes)
        for node in nodes:
            primary.add(node, tree_sum(values, node))
    assert primary.numbers == {fold.root: tree_sum(values, fold.root)}


@given(runs=runs_st, rng=seeds_st)
def test_a_set_of_partials_stays_disjoint_and_leaves_no_siblings(runs: int, rng: random.Random) -> None:
    fold = Fold(runs)
    held: frozenset[Node] = frozenset()
    for _ in range(20):
        node = any_node(fold, rng)
        before = leaves(held)
        after, steps = absorb(fold, held, node)
        assert leaves(after) == before | leaves([node])
        assert len(leaves(after)) == sum(stop - start for start, stop in after)
        assert not any(set(split(parent)) <= after for parent in inner_nodes(fold))
        assert all(fold.cover(range(*have)) == (have,) for have in after)
        assert steps == in_order(steps)
        held = after


@given(runs=runs_st, rng=seeds_st)
def test_within_a_target_nothing_is_combined_above_it(runs: int, rng: random.Random) -> None:
    fold = Fold(runs)
    target = any_node(fold, rng)
    sibling_there: frozenset[Node] = frozenset()
    if target != fold.root:
        left, right, _ = fold.parent(target)
        sibling_there = frozenset({right if left == target else left})
    held = sibling_there
    for run in range(*target):
        held, _ = absorb(fold, held, (run, run + 1), within=target)
    assert held == sibling_there | {target}


@given(runs=runs_st, rng=seeds_st)
def test_cover_is_exact_and_minimal(runs: int, rng: random.Random) -> None:
    fold = Fold(runs)
    wanted = {run for run in range(runs) if rng.random() < 0.6}
    nodes = fold.cover(wanted)
    assert leaves(nodes) == wanted
    assert len(wanted) == sum(stop - start for start, stop in nodes)
    assert list(nodes) == sorted(nodes)
    # Minimal: no node of the tree above any of them is wanted whole.
    assert not any(
        leaves([parent]) <= wanted for node in nodes if node != fold.root for parent in [fold.parent(node)[2]]
    )


@given(runs=runs_st)
def test_every_inner_node_splits_into_two_adjacent_nodes(runs: int) -> None:
    fold = Fold(runs)
    for parent in inner_nodes(fold):
        left, right = split(parent)
        assert (left[0], left[1], right[1]) == (parent[0], right[0], parent[1])
        assert left[1] - left[0] >= right[1] - right[0]
        assert fold.parent(left) == fold.parent(right) == (left, right, parent)


def any_node(fold: Fold, rng: random.Random) -> Node:
    node = fold.root
    while node[1] - node[0] > 1 and rng.random() < 0.7:
        node = rng.choice(split(node))
    return node


def inner_nodes(fold: Fold) -> list[Node]:
    found: list[Node] = []
    todo = [fold.root]
    while todo:
        node = todo.pop()
        if node[1] - node[0] > 1:
            found.append(node)
            todo.extend(split(node))
    return found


def in_order(steps: list[Combine]) -> list[Combine]:
    """Bottom up: what a step adds is there before it."""
    return sorted(steps, key=lambda step: step.parent[1] - step.parent[0])
