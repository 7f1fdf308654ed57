"""What a storm consists of, drawn from a seed: a model, how it is trained, a job and the faults that strike it.

Pure: the same seed gives the same case on every machine. What a fault strikes at which moment is found out in the
running job (`strikes.py`); here stand only fractions, commits and milliseconds.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.storm.surroundings import PLAIN, Infrastructure, draw_surroundings

SHAPES = ("vector", "image", "token")
DTYPES = ("float32", "float64", "bfloat16")
NORMS = ("none", "batch", "layer")
OPTIMIZERS = ("sgd", "momentum", "adamw", "amsgrad")
SCHEDULERS = ("none", "cosine", "onecycle", "step", "warmup")
WEIGHTS = ("none", "float", "tensor")
DRAWS = ("none", "python", "numpy", "torch")
SLOW = ("none", "first", "last", "both")
FROZEN = ("none", "first", "middle")
LOSSES = ("member", "agent", "node")
"""Targets whose SIGKILL takes state away."""
MOMENTS = ("random", "start", "idle", "committed", "recovering", "starting", "joined")
"""start: before the first commit; the others as in `moments.py`."""
SHORT_S, LONG_S = 1.0, 6.0
"""How long somebody is stopped. An agent is taken for silent between the two."""
SLOW_STEP_MS, LONG_JOB_MS = 200.0, 10_000.0
"""At the most, without faults: what slow blocks add to a step, and what a job takes (with many faults more)."""
LATE_STEP_MS = 240.0
"""What a slow first block adds to the step of the fastest member where the others are to wait for long."""
ROOM_FOR_COMMITS = 7
"""Steps of a job per fault, at the least: so many commits lie between two faults that are waited for."""
MANY_FAULTS = 6
IDLE_CASES = 0.4
"""The share of cases that are made for killing idle members."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and its data; sizes are small, so that a step takes milliseconds beside the pauses."""

    shape: str
    depth: int
    width: int
    image: int
    """Side of an image in pixels: a convolution over all of it is few parameters and much work."""
    norm: str
    dropout: float
    tied: bool
    frozen: str
    unused: bool
    empty: bool
    """A parameter without elements, outside of all blocks."""
    sometimes: bool
    """A block that only some micro-batches go through."""
    checkpointing: bool
    dtype: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained, and how long its pieces take in members (never alone: waiting changes no bit)."""

    steps: int
    micro_batches: int
    micro_batch_size: int
    run_length: int
    backups: int | str
    optimizer: str
    groups: int
    scheduler: str
    max_grad_norm: float | None
    weight: str
    draws: str
    """The generator from which the loop draws a factor of the loss, once per step."""
    nan_at: int
    """A step whose loss is not a number; -1 for none."""
    loaders: int
    pause_ms: float
    """Beside computing, per micro-batch."""
    slow: str
    slow_ms: float
    """How long the backward of the slow blocks takes."""
    uneven: bool
    """Members differ in all of these times."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One strike, due `commits` commits and then `delay_ms` after the one before (after the start for the first).

    kind: kill or stop. target: member, newcomer, loader, agent (with one node: the launcher), node, etcd, all (members,
    at once). A newcomer is a worker that is still starting: `delay_ms` counts from its start.
    """

    kind: str
    target: str
    commits: int
    delay_ms: float
    pick: float
    """Which of those that could be struck, as a fraction of their list."""
    stopped_s: float = 0.0
    when: str = "random"
    """At the first such moment that lasts for `delay_ms`; at random if none comes."""

    def __str__(self) -> str:
        held = f" for {self.stopped_s:g} s" if self.kind == "stop" else ""
        moment = "" if self.when == "random" else f" when {self.when}"
        due = f"{self.commits} commits + {self.delay_ms:.0f} ms after the last"
        return f"{self.kind} {self.target}{held}{moment}, {due}"


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    workers: int
    """Of all nodes together."""
    nodes: int
    """1: a job on one node; else simulated nodes with an etcd."""
    model: Model
    training: Training
    faults: tuple[Fault, ...]
    started: Infrastructure = PLAIN

    def __str__(self) -> str:
        parts = (f"{name}={value}" for part in (self.model, self.training) for name, value in asdict(part).items())
        faults = "".join(f"\n    {number}. {fault}" for number, fault in enumerate(self.faults, 1))
        where = f"{self.workers} workers on {self.nodes} node" + ("s" if self.nodes > 1 else "")
        return f"case {self.seed}: {where}, {self.started}\n    {' '.join(parts)}{faults}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        fields: dict[str, Any] = json.loads(text)
        faults = tuple(Fault(**fault) for fault in fields.pop("faults"))
        model, training = Model(**fields.pop("model")), Training(**fields.pop("training"))
        started = Infrastructure(**fields.pop("started"))
        return Case(model=model, training=training, faults=faults, started=started, **fields)


def draw(seed: int) -> Case:
    """The case of a seed."""
    if random.Random(f"storm, idle members {seed}").random() < IDLE_CASES:
        return _idle_case(seed)
    chance = random.Random(f"storm {seed}")
    nodes = 3 if chance.random() < 0.3 else 1
    workers = 3 if nodes == 3 else chance.choice((2, 3, 3, 4, 5))
    backups = chance.choice((0, 1, 1, 1, 2, 2, "all"))
    faults = _faults(chance, backups=backups, nodes=nodes)
    model = _model(chance)
    training = _training(chance, model, backups=backups, workers=workers, faults=len(faults))
    if any(fault.when in ("idle", "recovering") for fault in faults) and chance.random() < 0.8:
        training = _late(chance, training, workers=workers, steps=ROOM_FOR_COMMITS * (len(faults) + 1))
    # A generator of its own, so that a seed of older results draws the same model, and faults but for the last one.
    chance = random.Random(f"storm, surroundings {seed}")
    has_stages = not (model.sometimes or training.draws != "none")
    started = draw_surroundings(chance, may_have_stages=has_stages)
    if started.checkpoints != "none" and chance.random() < 0.4:
        faults = (*faults[:-1], replace(faults[-1], kind="kill", target="all", when="random", stopped_s=0.0))
    if started.stages > 1:
        started = replace(started, slows=chance.choice(("", "m0", "m1")))
    return Case(seed=seed, workers=workers, nodes=nodes, model=model, training=training, faults=faults, started=started)


def _idle_case(seed: int) -> Case:
    """Three or four uneven members, one backup, and idle ones killed: our own schedules seldom have all three.

    Only there does a gradient that was handed over, or its partial sum, outlive the step in which its member died.
    """
    chance = random.Random(f"storm {seed}")
    workers = chance.choice((3, 4))
    kills = tuple(
        Fault(
            kind="kill",
            target="member",
            commits=chance.randint(2, 4),
            delay_ms=chance.uniform(10, 120),
            pick=chance.random(),
            when="idle",
        )
        for _ in range(chance.choice((2, 3)))
    )
    faults = (*kills, _fault(chance, backups=1, nodes=1))
    model = _model(chance)
    training = _training(chance, model, backups=1, workers=workers, faults=len(faults))
    training = _late(chance, training, workers=workers, steps=ROOM_FOR_COMMITS * (len(faults) + 1))
    return Case(seed=seed, workers=workers, nodes=1, model=model, training=training, faults=faults)


def _model(chance: random.Random) -> Model:
    shape = chance.choice(SHAPES)
    dtype = chance.choice(("float32",) * 6 + DTYPES)
    norm = chance.choice(("none", "layer") if dtype == "bfloat16" else NORMS)
    return Model(
        shape=shape,
        depth=chance.randint(1, 6),
        width=chance.choice((16, 33, 64, 128, 200)),
        image=chance.choice((16, 32, 64)),
        norm=norm,
        dropout=chance.choice((0.0, 0.1, 0.5)),
        tied=shape == "token" and chance.random() < 0.6,
        frozen=chance.choice(("none", "none", *FROZEN)),
        unused=chance.random() < 0.3,
        empty=chance.random() < 0.2,
        sometimes=chance.random() < 0.3,
        # Recomputing would measure the batch a second time.
        checkpointing=norm != "batch" and chance.random() < 0.2,
        dtype=dtype,
        samples=chance.randint(90, 500),
    )


def _training(chance: random.Random, model: Model, *, backups: int | str, workers: int, faults: int) -> Training:
    micro_batches = chance.randint(1, 13)
    run_length = chance.randint(1, 4)
    each = min(micro_batches, math.ceil(math.ceil(micro_batches / run_length) / workers) * run_length)
    """Micro-batches of a member in a step, if all take the same."""
    slow, uneven = chance.choice(SLOW), chance.random() < 0.4
    slow_ms = min(chance.choice((5.0, 30.0, 150.0)), SLOW_STEP_MS / each / (2 if slow == "both" else 1))
    step_ms = chance.uniform(20, 100)
    all_ms = (step_ms + each * slow_ms * (slow != "none")) * (2 if uneven else 1)
    steps = max(min(chance.randint(40, 160), int(LONG_JOB_MS / all_ms)), ROOM_FOR_COMMITS * (faults + 1))
    return Training(
        steps=steps,
        micro_batches=micro_batches,
        # Of a single sample there is no variance.
        micro_batch_size=chance.randint(2 if model.norm == "batch" else 1, 7),
        run_length=run_length,
        backups=backups,
        optimizer=chance.choice(OPTIMIZERS),
        groups=chance.choice((1, 2)),
        scheduler=chance.choice(SCHEDULERS),
        max_grad_norm=chance.choice((None, 0.5)),
        weight=chance.choice(WEIGHTS),
        draws=chance.choice(("none", *DRAWS)),
        nan_at=chance.randrange(steps) if chance.random() < 0.15 else -1,
        loaders=chance.choice((1, 1, 2, 3)),
        pause_ms=step_ms / each,
        slow=slow,
        slow_ms=slow_ms,
        uneven=uneven,
    )


def _late(chance: random.Random, training: Training, *, workers: int, steps: int) -> Training:
    """Uneven members with several runs each, and a slow first block: some are idle for long while others compute, and a
    step may be complete while somebody is still in a backward.
    """
    lengths = [length for length in (1, 2, 3) if 2 * workers * length <= 13]
    length = chance.choice(lengths)
    micro_batches = chance.randint(2 * workers * length, 13)
    each = math.ceil(math.ceil(micro_batches / length) / workers) * length
    slow_ms = min(chance.choice((40.0, 80.0, 150.0)), LATE_STEP_MS / each)
    return replace(
        training,
        steps=steps,
        micro_batches=micro_batches,
        run_length=length,
        pause_ms=chance.uniform(20, 60) / each,
        slow="first",
        slow_ms=slow_ms,
        uneven=True,
        nan_at=min(training.nan_at, steps - 2),
    )


def _faults(chance: random.Random, *, backups: int | str, nodes: int) -> tuple[Fault, ...]:
    """Two to seven: some before the first commit; after a loss often another, of somebody else or of the newcomer."""
    found: list[Fault] = []
    if chance.random() < 0.3:
        targets = ("member",) if nodes == 1 else ("member", "node")
        found += [_at(chance, "start", chance.choice(targets), 0.0, 5000.0) for _ in range(chance.choice((1, 1, 2)))]
    for _ in range(chance.randint(2, 3)):
        fault = _fault(chance, backups=backups, nodes=nodes)
        found.append(fault)
        if fault.kind == "kill" and fault.target in LOSSES:
            found += _after_a_loss(chance, backups)
    return tuple(found[:MANY_FAULTS])


def _after_a_loss(chance: random.Random, backups: int | str) -> list[Fault]:
    if backups in (2, "all") and chance.random() < 0.5:
        return [_at(chance, "recovering", "member", 0.0, chance.choice((0.0, 60.0, 500.0)))]
    kind = chance.random()
    if kind < 0.3:
        return [_fault_of(chance, chance.choice(("kill", "stop")), "newcomer", at_once=True)]
    if kind < 0.45:
        return [_at(chance, "starting", "member", 0.0, 3000.0)]
    return [_at(chance, "joined", "member", 0.0, 300.0)] if kind < 0.65 else []


def _at(chance: random.Random, when: str, target: str, *delays_ms: float) -> Fault:
    """The loss that follows the last strike at its next such moment."""
    return Fault(
        kind="kill",
        target=target,
        commits=0,
        delay_ms=chance.uniform(*delays_ms),
        pick=chance.random(),
        when=when,
    )


def _fault(chance: random.Random, *, backups: int | str, nodes: int) -> Fault:
    kinds = [("stop", "member"), ("stop", "agent"), ("kill", "loader"), ("stop", "loader")]
    if backups != 0:
        kinds += [("kill", "member")] * 6
    if nodes > 1:
        kinds += [("stop", "node"), ("stop", "etcd")]
        kinds += [("kill", "node"), ("kill", "node"), ("kill", "agent")] if backups != 0 else []
    kind, target = chance.choice(kinds)
    fault = _fault_of(chance, kind, target, at_once=chance.random() < 0.25)
    if kind == "kill" and target in ("member", "node"):
        when = chance.choices(("random", "idle", "committed"), (2, 5, 1))[0]
        delays_ms = {"random": fault.delay_ms, "idle": chance.uniform(10, 120), "committed": 0.0}
        return replace(fault, when=when, delay_ms=delays_ms[when])
    return fault


def _fault_of(chance: random.Random, kind: str, target: str, *, at_once: bool) -> Fault:
    delays_ms = (0.0, 3000.0) if target == "newcomer" else (0.0, 120.0)
    return Fault(
        kind=kind,
        target=target,
        commits=0 if at_once else chance.randint(2, ROOM_FOR_COMMITS),
        delay_ms=chance.uniform(*delays_ms),
        pick=chance.random(),
        stopped_s=chance.choice((SHORT_S, LONG_S)) if kind == "stop" else 0.0,
    )
