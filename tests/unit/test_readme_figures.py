"""Every figure of README's "Measured" is in a results file: here is which, and how it is made of the record."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.support.sources import ROOT

Figures = dict[str, Any]

STORM = ("recovery/results/quick.jsonl", "2026-11-21T00:41:27+00:00")
NODES = ("recovery/results/quick.jsonl", "2026-11-21T07:02:06+00:00")
PRICE = ("price/results/full.jsonl", "2026-11-21T03:49:37+00:00")
GOODPUT = ("goodput/results/full.jsonl", "2026-11-22T20:08:04+00:00")
PEERS = "recovery/peers/results/quick.jsonl"


@dataclass(frozen=True)
class Claim:
    """`shown` stands in README in `where`: a record (file, date) or a file, whose key or a formula over it gives it."""

    where: str
    shown: str
    record: tuple[str, str] | str
    key: str | Callable[[Figures], float]
    unit_s: float = 1.0  # what one of the shown unit is in the record's


def throughput(found: Figures) -> float:
    """By the medians of the steps: two processes make one step each while two workers make two together."""
    return float(found["plain_2_step_s"] / (2 * found["elastrain_2_step_s"]))


def against_ddp_with_backup(found: Figures) -> float:
    return float(found["elastrain_4_backup_step_s"] / found["ddp_4_step_s"])


MS = 1e-3
CLAIMS = (
    Claim("killed → known", "3 ms", STORM, "detect_s", MS),
    Claim("known → the last survivor", "16 ms", STORM, "comm_recovery_s", MS),
    Claim("no survivor computes", "23 ms (", STORM, "standstill_s", MS),
    Claim("no survivor computes", "step: 23 ms)", STORM, "standstill_undisturbed_s", MS),
    Claim("wait of a survivor", "17 ms,", STORM, "rejoin_stall_s", MS),
    Claim("wait of a survivor", "75 ms", STORM, "rejoin_first_step_s", MS),
    Claim("committed steps done again", "0", STORM, "steps_lost"),
    Claim("nobody computes for", "20 ms", NODES, "node_standstill_worst_s", MS),
    Claim("at most after a node's death", "24 ms", NODES, "comm_recovery_s", MS),
    Claim("step by more than", "37 ms", NODES, "etcd_outage_delay_s", MS),
    Claim("one worker against a plain PyTorch loop", "1.03 ×", PRICE, "price_1"),
    Claim("two workers against two independent", "0.95 of", PRICE, throughput),
    Claim("`backups=1` against `0`", "1.02 ×", PRICE, "backup_price"),
    Claim("`backups=0`, the worse of two", "1.02 ×", PRICE, "time_ratio_ddp"),
    Claim("`backups=1` (the default)", "1.04 ×", PRICE, against_ddp_with_backup),
    Claim("peak bytes per member", "1.04 ×", PRICE, "bytes_ratio_zero1"),
    Claim("peak bytes per member", "1.11 ×", PRICE, "bytes_ratio_zero1_backup"),
    Claim("under torchrun", "5.5 s", PEERS, "standstill_torchrun_s"),
    Claim("under torchrun", "9.6 s", PEERS, "standstill_torchft_defaults_s"),
    Claim("under TorchFT as its documentation", "0.57 s", PEERS, "standstill_torchft_s"),
    Claim("which loses the interrupted step", "0.11 s", (PEERS, "2026-11-21T03:06:06+00:00"), "standstill_torchft_s"),
    Claim("which loses the interrupted step", "0.03 s", PEERS, "standstill_s"),
    Claim("with a kill every 60 s elastrain keeps", "0.998", GOODPUT, "goodput_60"),
    Claim("with a kill every 15 s elastrain keeps", "0.92", GOODPUT, "goodput_15"),
    Claim("checkpoint every 10 s 0.81", "0.81", GOODPUT, "goodput_torchrun_60"),
    Claim("TorchFT 0.73", "0.73", GOODPUT, "goodput_torchft_60"),
    Claim("torchrun 0.42", "0.42", GOODPUT, "goodput_torchrun_15"),
    Claim("TorchFT 0.56", "0.56", GOODPUT, "goodput_torchft_15"),
)
OTHER_TIMEOUTS = "2026-11-21T03:06:06+00:00"  # TorchFT's alone, with other settings: a figure of its own


@cache
def measured() -> str:
    text = (ROOT / "README.md").read_text()
    return text[text.index("## Measured") : text.index("## Limits")]


def recorded(claim: Claim) -> float:
    file, date = claim.record if isinstance(claim.record, tuple) else (claim.record, None)
    entries = [json.loads(line) for line in (ROOT / "experiments" / file).read_text().splitlines()]
    wanted = [each["figures"] for each in entries if (each["date"] == date if date else each["date"] != OTHER_TIMEOUTS)]
    assert wanted, f"{file} has no record of {date}"
    if callable(claim.key):
        return statistics.median(claim.key(each) for each in wanted)
    return statistics.median(each[claim.key] for each in wanted if each.get(claim.key) is not None)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.where}: {claim.shown}")
def test_a_figure_is_what_its_record_says(claim: Claim) -> None:
    line = next(line for line in measured().splitlines() if claim.where in line)
    assert claim.shown in line
    number = re.search(r"[\d.]+", claim.shown)
    assert number is not None
    decimals = len(number[0].partition(".")[2])
    assert f"{recorded(claim) / claim.unit_s:.{decimals}f}" == number[0]


def test_every_figure_of_the_tables_has_a_claim() -> None:
    rows = [line for line in measured().splitlines() if line.startswith("| ") and line.count("|") == 3]
    for row in rows:
        value = row.split("|")[2]
        claims = [claim for claim in CLAIMS if claim.where in row]
        shown = sorted(re.search(r"[\d.]+", claim.shown)[0] for claim in claims)  # type: ignore[index]
        assert sorted(re.findall(r"\d+(?:\.\d+)?", value)) == shown, row


def test_the_digests_of_the_cited_runs_are_equal() -> None:
    for file, date in (STORM, NODES):
        lines = (ROOT / "experiments" / file).read_text().splitlines()
        (found,) = [entry["figures"] for entry in map(json.loads, lines) if entry["date"] == date]
        assert found["digest_equal"] is True
