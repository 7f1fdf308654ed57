"""The arithmetic of the measurements, and the account of live tensor bytes."""

from __future__ import annotations

import ast
import json
import mmap
import os
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from experiments.baselines.workload import Measurement, Workload, member_share, step_batches, step_seconds, summary
from experiments.harness import ROOT, Reach, interleave, machine, quantile, ratio, record, report
from experiments.memory import MemoryAccount, own_memfd_bytes
from experiments.plots import bars, lines
from experiments.price.run import REACHES, Run, figures
from experiments.train_gpt.data import Windows

MIB = 1 << 20


@pytest.mark.parametrize(("fraction", "expected"), [(0, 1.0), (0.5, 2.5), (1, 4.0), (0.25, 1.75)])
def test_quantile_interpolates(fraction: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], fraction) == expected


def test_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)


def test_ratio_compares_within_rounds() -> None:
    slow_middle_round = ([1.1, 5.5, 1.1], [1.0, 5.0, 1.0])
    assert ratio(*slow_middle_round) == pytest.approx(1.1)
    assert ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0
    with pytest.raises(ValueError, match="one figure per round"):
        ratio([1.0], [1.0, 2.0])


def test_rounds_alternate_their_order_and_keep_each_case_apart() -> None:
    ran: list[str] = []

    def case(name: str) -> str:
        ran.append(name)
        return name

    cases = {name: partial(case, name) for name in "ABC"}
    found = interleave(cases, rounds=3)
    assert "".join(ran) == "ABCCBAABC"
    assert found == {"A": ["A"] * 3, "B": ["B"] * 3, "C": ["C"] * 3}


def test_a_reach_holds_on_its_side_of_the_limit_only() -> None:
    assert Reach(limit=1.03).met(1.03) and not Reach(limit=1.03).met(1.04)
    assert Reach(limit=0.95, at_least=True).met(0.95) and not Reach(limit=0.95, at_least=True).met(0.94)
    assert not Reach(limit=1.0).met(None) and not Reach(limit=1.0).met(float("nan"))


def test_report_ends_with_one_json_object_and_says_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    met = report({"price": 1.0, "other": float("nan")}, {"price": Reach(limit=1.03), "absent": Reach(limit=1)})
    output = capsys.readouterr().out.splitlines()
    assert not met
    assert json.loads(output[-1]) == {"price": 1.0, "other": None}
    assert output[0].endswith("met") and output[1].endswith("MISSED")


def test_results_are_appended_with_what_they_depend_on(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        record("price", {"price_1": value}, quick=True, settings={"size": "tiny"}, folder=tmp_path)
    entries = [json.loads(line) for line in (tmp_path / "quick.jsonl").read_text().splitlines()]
    assert [entry["figures"]["price_1"] for entry in entries] == [1.0, 2.0]
    assert entries[0]["commit"], "at least the word unknown, outside a repository"
    assert entries[0]["machine"] | {"load_1min": 0} == machine() | {"load_1min": 0}
    assert entries[0]["date"].endswith("+00:00")


@pytest.mark.slow
def test_plots_are_written(tmp_path: Path) -> None:
    assert bars(tmp_path / "a.png", {"x": [1, 2, 3]}, label="s", title="t").stat().st_size > 1000
    series = {"loss": ([0, 1], [2.0, 1.0])}
    assert lines(tmp_path / "b.png", series, labels=("step", "loss"), title="t").stat().st_size > 1000


def _runs(**changed: float) -> dict[str, list[Run]]:
    """Every case takes 1 s (4 members: on two cores as long as 2) and 100 bytes, but for what is changed."""
    names = ("plain_1", "elastrain_1", "plain_2", "elastrain_2", "ddp_2", "elastrain_4", "elastrain_4_backup", "ddp_4")
    times = dict.fromkeys(names, 1.0) | {"plain_1": 2.0, "elastrain_1": 2.0, "plain_2": 2.0} | changed
    weighed = {
        name: [Run(step_s=1.0, cpu_s=1.0, peak_bytes=100, resting_bytes=20)]
        for name in ("zero1_4", "lean_4", "lean_4_backup")
    }
    return {name: [Run(step_s=step_s, cpu_s=2 * step_s)] for name, step_s in times.items()} | weighed


def test_price_figures_are_one_when_elastrain_costs_nothing() -> None:
    found = figures(_runs())
    assert {name: found[name] for name in REACHES} == dict.fromkeys(REACHES, 1.0)


def test_price_figures_move_with_their_own_case() -> None:
    assert figures(_runs(elastrain_1=2.2))["price_1"] == pytest.approx(1.1)
    assert figures(_runs(elastrain_4_backup=1.2))["backup_price"] == pytest.approx(1.2)
    assert figures(_runs(ddp_2=0.8))["time_ratio_ddp"] == pytest.approx(1.25)
    assert figures(_runs(ddp_4=0.5))["time_ratio_ddp"] == pytest.approx(2.0)
    heavy = _runs() | {"lean_4": [Run(step_s=1.0, cpu_s=1.0, peak_bytes=130, resting_bytes=30)]}
    assert figures(heavy)["bytes_ratio_zero1"] == pytest.approx(1.3)
    assert figures(heavy)["resting_ratio_zero1"] == pytest.approx(1.5)


def test_scaling_is_judged_by_what_two_independent_processes_reach() -> None:
    assert figures(_runs(elastrain_2=1.25))["scaling_2"] == pytest.approx(0.8)
    assert figures(_runs(elastrain_2=1.25, plain_2=2.5))["scaling_2"] == pytest.approx(1.0), (
        "a machine that allows no more"
    )


@pytest.mark.parametrize("members", [1, 2, 4, 8, 16])
def test_members_share_all_micro_batches_in_aligned_runs(members: int) -> None:
    shares = [member_share(16, rank=rank, members=members) for rank in range(members)]
    assert [index for share in shares for index in share] == list(range(16))
    assert all(a.stop == b.start for a, b in pairwise(shares))


def test_members_that_do_not_divide_the_step_are_refused() -> None:
    with pytest.raises(ValueError, match="choose a multiple"):
        member_share(16, rank=0, members=3)


def test_any_number_of_members_sees_the_same_samples_in_a_step() -> None:
    work, windows, order = (
        Workload(micro_batch_size=2, micro_batches=4),
        Windows("train", context=128),
        list(range(100, 111)),
    )
    alone = step_batches(windows, order, work, step=3, share=member_share(4, rank=0, members=1))
    shared = [
        batch
        for rank in range(2)
        for batch in step_batches(windows, order, work, step=3, share=member_share(4, rank=rank, members=2))
    ]
    assert len(alone) == len(shared) == 4
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(alone, shared, strict=True))
    assert torch.equal(alone[0][0][0], windows[order[24 % 11]][0])


def test_a_runs_seconds_are_the_mean_of_its_members_medians() -> None:
    found = [
        Measurement(step_s=[1.0, 9.0, 2.0], cpu_s=[1.0, 5.0, 2.0], losses=[4.0]),
        Measurement(step_s=[4.0], cpu_s=[3.0], losses=[2.0], peak_bytes=7),
    ]
    assert step_seconds(found) == 3.0
    assert summary(found)["cpu_s"] == 5.0
    assert summary(found)["peak_bytes"] == 7
    assert summary(found)["last_loss"] == 3.0


def test_peak_counts_what_lived_at_once_exactly_and_not_what_was_gone() -> None:
    account = MemoryAccount()
    resting = account.live_bytes()
    with account.measure() as usage:
        first = torch.zeros(MIB, dtype=torch.uint8)
        del first
        second = torch.zeros(2 * MIB, dtype=torch.uint8)
        third = torch.zeros(3 * MIB, dtype=torch.uint8)
    assert usage.peak_bytes - resting == 5 * MIB
    assert account.live_bytes() - resting == 5 * MIB
    del second, third
    assert account.live_bytes() == resting


def test_tensors_of_other_threads_are_counted() -> None:
    account = MemoryAccount()
    resting = account.live_bytes()
    kept: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(torch.zeros(MIB, dtype=torch.uint8)))
    thread.start()
    thread.join(timeout=10)
    assert account.live_bytes() - resting == MIB


def test_external_bytes_are_added_by_name() -> None:
    account = MemoryAccount(external=lambda: 10)
    resting = account.live_bytes()
    account.register_external("segment", 100)
    account.register_external("segment", 300)
    assert account.live_bytes() - resting == 300
    account.register_external("segment", 0)
    assert account.live_bytes() == resting


def test_an_empty_measurement_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tensor operation"), MemoryAccount().measure():
        pass


def _mapping(flags: str, inode: int, resident_kib: int, name: str = "/memfd:seg (deleted)") -> list[str]:
    return [
        f"7f00-7f80 {flags} 00000000 00:01 {inode}  {name}",
        "Size:  512 kB",
        f"Rss:  {resident_kib} kB",
        "VmFlags: rd",
    ]


def test_only_own_writable_segments_count_and_each_once() -> None:
    own = _mapping("rw-s", 1, 64)
    twice = _mapping("rw-s", 1, 32)
    peers = _mapping("r--s", 2, 128)
    heap = _mapping("rw-p", 0, 256, name="[heap]")
    assert own_memfd_bytes([*own, *peers, *heap, *twice]) == 64 * 1024


def test_a_real_segment_counts_by_the_pages_that_were_touched() -> None:
    before = own_memfd_bytes()
    descriptor = os.memfd_create("elastrain-test")
    os.ftruncate(descriptor, 4 * MIB)
    with mmap.mmap(descriptor, 4 * MIB) as segment:
        segment[:MIB] = bytes(MIB)
        assert own_memfd_bytes() - before == MIB
    os.close(descriptor)


def test_no_experiment_changes_tracked_files_unless_asked() -> None:
    """Each call of `record`, and each picture in `results`, stands under a condition that `--record` makes true."""
    calls = 0
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        text = path.read_text()
        if path.name in ("harness.py", "plots.py") or "import" not in text or "record(" not in text:
            continue
        tree = ast.parse(text)
        guarded = {
            id(call)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "record" in ast.unparse(node.test)
            for call in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "record":
                calls += 1
                assert id(node) in guarded or "if not keep:" in text or "if keep:" in text, f"{path}:{node.lineno}"
    assert calls >= 12
