"""The profile of a job as a value: seconds of blocks, speeds of members, rates, and how measurements change it. Pure.

A profile begins with the FLOPs of the block graph. `fitted` takes measurements in: the members' speeds first, then the
seconds of single blocks. Medians smooth both, so one noisy step moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median

from elastrain.pipeline.graph import BlockGraph

WINDOW = 5
"""Measurements of which the median counts."""
NOISE = 0.03
"""Relative noise of a value that was never measured."""
RATE_NOISE = 0.1
"""Relative noise of a fixed time or of a rate, at least: no plan depends on less."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal noise, in units of its median absolute deviation."""


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block for one micro-batch, on a member of speed 1."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float


@dataclass(frozen=True, kw_only=True)
class StepRates:
    """Rates in bytes per second, and fixed seconds."""

    inside_bytes_per_s: float = 4e9
    """Boundary tensors between members of one node."""
    between_bytes_per_s: float = 1e9
    """Boundary tensors between nodes."""
    links: tuple[tuple[str, str, float], ...] = ()
    """(member, member, bytes per second) of links that differ from the two rates above, in both directions."""
    message_s: float = 0.0
    """Fixed seconds per boundary tensor."""
    reduce_bytes_per_s: float = 4e9
    publish_bytes_per_s: float = 4e9
    action_s: float = 0.0
    """Fixed seconds per action of the training loop."""
    split_price: float = 0.0
    """Part of its seconds that a backward takes longer in two actions than in one."""
    step_s: float = 0.0
    """Fixed seconds per step, for the commit."""


@dataclass(frozen=True, kw_only=True)
class JobProfile:
    """All that the planner knows of the job. Sequences go by blocks, or by cuts `0..n`, of the block graph."""

    blocks: tuple[BlockSeconds, ...]
    activation_bytes: tuple[int, ...]
    """Per cut: bytes that cross it forward for one micro-batch."""
    gradient_bytes: tuple[int, ...]
    """Per cut: bytes that cross it backward for one micro-batch."""
    parameter_bytes: tuple[int, ...]
    """Per block."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Member -> speed, relative to the median of its peers. A member that is not named has speed 1."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Member -> node. Members that are not named share one node."""
    rates: StepRates = StepRates()
    noise: float = NOISE
    """Relative noise of a predicted step."""

    def __post_init__(self) -> None:
        n = len(self.blocks)
        if (
            not n
            or not len(self.activation_bytes) == len(self.gradient_bytes) == n + 1 == len(self.parameter_bytes) + 1
        ):
            raise ValueError(f"a profile has bytes for each of its {n} blocks, and of one cut more")
        # A single NaN would make every comparison of plans false, and the first candidate would win.
        rates = {name: value for name, value in vars(self.rates).items() if name.endswith("bytes_per_s")}
        fixed = {name: value for name, value in vars(self.rates).items() if name not in (*rates, "links")}
        rates |= {f"the rate from {a} to {b}": rate for a, b, rate in self.rates.links}
        for name, value in {**rates, **{f"the speed of {m}": speed for m, speed in self.speeds.items()}}.items():
            if not isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        seconds = {f"{name} of block {i}": s for i, each in enumerate(self.blocks) for name, s in vars(each).items()}
        for name, value in {**seconds, **fixed}.items():
            if not isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a number of at least 0; got {value}")


def profile_of(graph: BlockGraph, parameter_bytes: Sequence[int], flops_per_s: float) -> JobProfile:
    """Return the profile with which a job begins. A backward is counted as twice the FLOPs of its forward."""
    # A graph without any FLOPs is taken as even: all plans would be equally good otherwise.
    flops = graph.flops if any(graph.flops) else (1,) * len(graph.blocks)
    seconds = [each / flops_per_s for each in flops]
    blocks = tuple(BlockSeconds(forward_s=s, input_gradient_s=s, weight_gradient_s=s) for s in seconds)
    forward = tuple(sum(each.size_bytes for each in crossing) for crossing in graph.crossings)
    back = tuple(sum(each.size_bytes for each in crossing if each.requires_grad) for crossing in graph.crossings)
    return JobProfile(
        blocks=blocks, activation_bytes=forward, gradient_bytes=back, parameter_bytes=tuple(parameter_bytes)
    )


@dataclass
class Gauge:
    """A measured value: the median of the last `WINDOW` measurements, its noise, and what was told of it."""

    recent: list[float] = field(default_factory=list)
    told: float | None = None
    least_noise: float = NOISE

    def add(self, value: float) -> None:
        """Add a measurement. Values that no clock can show (negative, NaN, infinite) are dropped."""
        if isfinite(value) and value >= 0:
            self.recent = [*self.recent, value][-WINDOW:]

    @property
    def noise(self) -> float:
        """Relative noise of one measurement."""
        if len(self.recent) < WINDOW:
            return self.least_noise
        middle = median(self.recent)
        spread = MAD_TO_SIGMA * median(abs(each - middle) for each in self.recent)
        return max(self.least_noise, spread / middle) if middle else self.least_noise

    def news(self) -> float | None:
        """Return the median if it is to be told: it has changed by more than its noise. It counts as told then."""
        # A median of fewer values would follow the first noisy steps.
        if len(self.recent) < WINDOW:
            return None
        middle = median(self.recent)
        if self.told is not None and abs(middle - self.told) <= self.noise * max(middle, self.told):
            return None
        self.told = middle
        return middle

    def forget_told(self) -> None:
        """Let the median be news again."""
        self.told = None


Measured = Mapping[str, Mapping[int, BlockSeconds]]
"""Member -> block -> seconds that the member takes for it."""


def fitted(profile: JobProfile, measured: Measured) -> JobProfile:
    """Return the profile after these measurements. A member or block without any keeps what it had."""
    # A member's speed is the median over its blocks, so one block that is dearer than its FLOPs makes no member slow.
    slowness = {m: _ratio(blocks, profile) for m, blocks in measured.items()}
    # A member whose blocks all take no time says nothing about its speed.
    slowness = {m: ratio for m, ratio in slowness.items() if ratio > 0}
    if not slowness:
        return profile
    # What all members have in common belongs to the blocks.
    common = median(slowness.values())
    speeds = {**profile.speeds, **{m: common / ratio for m, ratio in slowness.items()}}
    # Seconds are divided by slowness, so that blocks of slow members do not look dear.
    blocks = list(profile.blocks)
    for place in {place for each in measured.values() for place in each}:
        seen = [(each[place], speeds[m]) for m, each in measured.items() if place in each and m in slowness]
        if seen:
            blocks[place] = BlockSeconds(
                forward_s=median(s.forward_s * speed for s, speed in seen),
                input_gradient_s=median(s.input_gradient_s * speed for s, speed in seen),
                weight_gradient_s=median(s.weight_gradient_s * speed for s, speed in seen),
            )
    return replace(profile, blocks=tuple(blocks), speeds=speeds)


def with_rates(profile: JobProfile, told: Mapping[str, Mapping[str, float]], moved_bytes: int) -> JobProfile:
    """Return the profile with what members have told: fixed seconds by name, and the rate from each sender.

    moved_bytes: Bytes that a member reduces and publishes in each step, which the told `step_s` contains.
    """
    rates, known = profile.rates, StepRates()
    links: dict[tuple[str, str], float] = {}
    for taker, its in told.items():
        for giver in its.keys() & told.keys():
            # A pipeline sends both ways, so the slower way of a link counts.
            one, other = sorted((giver, taker))
            # A socket that was read late looks faster than any link is.
            links[one, other] = min(its[giver], links.get((one, other), known.between_bytes_per_s))
    if links:
        # Gradients and parameters go over the same links as boundary tensors.
        usual = median(links.values())
        rates = replace(rates, between_bytes_per_s=usual, reduce_bytes_per_s=usual, publish_bytes_per_s=usual)
    if seen := [each["action_s"] for each in told.values() if "action_s" in each]:
        rates = replace(rates, action_s=median(seen))
    # Most members wait in that time, too: until the last has computed, or until the first sends them something.
    if seen := [each["step_s"] for each in told.values() if "step_s" in each]:
        rates = replace(rates, step_s=max(0.0, min(seen) - moved_bytes / rates.publish_bytes_per_s))
    return replace(profile, rates=replace(rates, links=tuple((*pair, rate) for pair, rate in sorted(links.items()))))


def _ratio(measured: Mapping[int, BlockSeconds], profile: JobProfile) -> float:
    """Return the seconds of a member's blocks over those of the profile, or 0 if nothing can be compared."""
    pairs = [(_total(each), _total(profile.blocks[place])) for place, each in measured.items()]
    return median([seen / known for seen, known in pairs if known > 0 and isfinite(seen)] or [0.0])


def _total(seconds: BlockSeconds) -> float:
    return seconds.forward_s + seconds.input_gradient_s + seconds.weight_gradient_s
