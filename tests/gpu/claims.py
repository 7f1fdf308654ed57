"""The claims that only a device can show, in one table: what `make test-gpu` tells lines about, and what it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

LATER = (5, 6, 7)
"""Test parts that a later version brings."""
PARTS = {
    1: "the training script: bits",
    2: "recovery, errors, hangs",
    3: "prices",
    4: "pipelines",
    5: "memory limits and drives",
    6: "compiled models, captured graphs, the `torch.distributed` backend, GPUDirect Storage",
    7: "device memory that peers read in place",
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim about a key of the lines.

    It is shown once each of its cases has a value that reaches `bound`. A claim without a part needs several devices,
    or belongs to a part of `LATER`, so that no line can be about it.
    """

    key: str
    text: str
    part: int | None = None
    cases: tuple[str, ...] = ("",)
    bound: str = "true"
    """`true`, `≤ NUMBER`, `≥ NUMBER`, or `report` for a value that is only reported."""

    def reached(self, value: object) -> bool:
        """Return True if a value shows one case of the claim."""
        if self.bound == "true" or not isinstance(value, int | float):
            return value is True
        if self.bound == "report":
            return True
        sign, limit = self.bound.split()
        return value <= float(limit) if sign == "≤" else value >= float(limit)


PRICED = tuple(", ".join(each) for each in product(("124m", "1b"), ("8k", "32k"), ("free", "deterministic")))
"""Model, tokens per step, and whether torch's deterministic algorithms are on."""
SHORT_TO_LONG = ("2k", "8k", "32k")
MODELS = ("124m", "1b")

CLAIMS = (
    Claim(
        part=1,
        key="runs_equal",
        text="Two runs of the README's script, with the model on a device, have the same digest.",
    ),
    Claim(
        part=1,
        key="members_equal",
        cases=("2 members", "4 members"),
        text="Jobs of 2 and of 4 members on one GPU have the digest of the job of one.",
    ),
    Claim(
        part=1,
        key="digest_equal",
        cases=("killed and joined", "2 stages", "bf16, killed and joined", "autocast, killed and joined"),
        text="So have jobs that lose a member and get a new one, pipelines, models in bfloat16, and autocast; all eager.",
    ),
    Claim(
        part=2,
        key="standstill_s",
        bound="≤ 0.2",
        text="After a kill, no more than so many seconds go by in which no survivor computes (median).",
    ),
    Claim(
        part=2,
        key="join_s",
        bound="report",
        text="Seconds from the start of a replacement's process to its first micro-batch, without a cache of compiled kernels.",
    ),
    Claim(part=2, key="recovered_equal", text="The digest of the job in which that is measured is the job of one's."),
    Claim(
        part=2,
        key="node_equal",
        text="A job of two simulated nodes on one GPU that loses a node has the digest of the job of one.",
    ),
    Claim(
        part=2,
        key="error_contained",
        text="An illegal access ends one of two members on a GPU; the job has the digest of the job of one.",
    ),
    Claim(
        part=2,
        key="error_continued_s",
        bound="≤ 0.5",
        text="Seconds from that access until the other member computes again.",
    ),
    Claim(part=2, key="error_named", text="The message about that access names the device and its UUID."),
    Claim(part=2, key="oom_named", text="The message about a failed allocation names the device and its memory."),
    Claim(
        part=2,
        key="hang_equal",
        text="A member whose stream never ends is ended and replaced; the job has the digest of the job of one.",
    ),
    Claim(
        part=2,
        key="hang_found_s",
        bound="≤ 0.5",
        text="It is ended so many seconds later than a member whose loop hangs.",
    ),
    Claim(
        part=3,
        key="time_ratio",
        cases=PRICED,
        bound="≤ 1.05",
        text="Step time of one member over that of the plain loop; bfloat16 with float32 masters.",
    ),
    Claim(
        part=3,
        key="ddp_ratio",
        cases=PRICED,
        bound="≤ 1.03",
        text="Step time of one member over that of DistributedDataParallel on NCCL with one rank.",
    ),
    Claim(
        part=3,
        key="sharing_ratio",
        cases=("2 members", "4 members"),
        bound="≥ 0.85",
        text="Members that share a GPU: throughput over that of as many plain processes side by side; 124m, 32k tokens "
        "per member and step.",
    ),
    Claim(
        part=3,
        key="carried_share",
        cases=SHORT_TO_LONG,
        bound="report",
        text="Share of a step in which copies between device and host go on and the member computes nothing; 124m, "
        "2 members on one GPU, no backups, tokens per member and step.",
    ),
    Claim(
        part=3,
        key="carried_share_calculated",
        cases=SHORT_TO_LONG,
        bound="report",
        text="The same, calculated from the measured rates of copies and the plain loop's step.",
    ),
    Claim(
        part=3,
        key="hidden",
        cases=SHORT_TO_LONG,
        bound="≥ 0.9",
        text="Share of the time of these copies during which the member computes a forward or backward.",
    ),
    Claim(
        part=3,
        key="copy_rate",
        cases=("out", "in"),
        bound="≥ 0.9",
        text="Rate of copies into and from memory that members share, over that of a bare copy from pinned memory.",
    ),
    Claim(
        part=3,
        key="pinned_gain",
        cases=("out", "in"),
        bound="report",
        text="The same rate over that of copies from memory that is not pinned.",
    ),
    Claim(
        part=3,
        key="peak_ratio",
        cases=MODELS,
        bound="≤ 1.05",
        text="The allocator's peak in a job of one member over that of the plain loop; 32k tokens per step.",
    ),
    Claim(
        part=3,
        key="host_bytes",
        cases=MODELS,
        bound="report",
        text="Peak of that member's resident host memory, in bytes.",
    ),
    Claim(
        part=3,
        key="deterministic_price",
        cases=tuple(", ".join(each) for each in product(MODELS, ("8k", "32k"))),
        bound="report",
        text="Plain loop: step time with torch's deterministic algorithms over that without.",
    ),
    Claim(
        part=4,
        key="stages_equal",
        cases=("2 stages", "3 stages"),
        text="Pipelines of 2 and 3 members on one GPU have the digest of the job of one.",
    ),
    Claim(
        part=4,
        key="stages_killed_equal",
        cases=("first", "middle", "last", "two pipelines"),
        text="So have pipelines of three that lose the member at one of their places, and a job of two pipelines that "
        "loses a member.",
    ),
    Claim(
        key="memory_limit", text="Jobs on a device keep within `--memory-limit`, with drives and without (test part 5)."
    ),
    Claim(key="compiled", text="Compiled models and captured graphs train with equal bits (test part 6)."),
    Claim(key="in_place", text="Peers read device memory in place, also that of a killed process (test part 7)."),
    Claim(key="nvlink", text="Anything on two GPUs or more: peers' access, NVLink, eight buses at the same time."),
    Claim(key="lost_gpu", text="A GPU that falls off its bus costs the members on it, and no others."),
)
