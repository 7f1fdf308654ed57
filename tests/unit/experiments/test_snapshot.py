"""The experiment with snapshots: its table, and the arithmetic of gaps and steps on made-up journals."""

from __future__ import annotations

import re

import pytest
import torch

from experiments.harness import ROOT
from experiments.journals import Member, MicroBatch
from experiments.snapshot import copies, overhead, window_train
from experiments.snapshot.overhead import EVERY, WARM, Load, Timed
from experiments.snapshot.run import PARTS, REACHES, reaches_of

README = ROOT / "experiments" / "snapshot" / "README.md"
STEPS = WARM + EVERY + 1


def a_member(*, slow: dict[int, float], gap_s: float = 0.1) -> Member:
    """Steps of one second, computing for all but `gap_s`; `slow`: step -> seconds lost after it."""
    member, now_s = Member(id="m0"), 0.0
    for step in range(STEPS):
        ended_s = now_s + 1 - gap_s
        member.micro_batches.append(MicroBatch(step=step, index=0, run=0, started_s=now_s, ended_s=ended_s))
        now_s += 1 + slow.get(step, 0.0)
        member.advanced_s[step] = now_s
    return member


def test_the_table_has_the_keys_of_all_parts_and_their_reaches() -> None:
    rows = [line.split("|")[1:4] for line in README.read_text().splitlines() if line.startswith("| `")]
    told = {key: reach.strip() for keys, _, reach in rows for key in re.findall(r"`(\w+)`", keys)}
    measured = {key for part in PARTS.values() for key in part.keys}
    assert measured <= set(told)
    assert {key: str(reach) for key, reach in REACHES.items()} == {k: r for k, r in told.items() if r != "–"}
    assert set(REACHES) <= measured


def test_quick_reaches_for_nothing_that_it_leaves_out() -> None:
    quick, whole = (reaches_of(["overhead"], is_quick) for is_quick in (True, False))
    assert set(whole) - set(quick) == {"overhead_b1", "overhead_b2", "overhead_b1_between"}


@pytest.mark.parametrize("late_step", [9, 10])
def test_a_stall_is_what_members_waited_and_gaps_are_seen_beside_it(late_step: int) -> None:
    members = [a_member(slow={late_step: 0.05}), a_member(slow={12: 0.02})]
    found = overhead.timed(members, written={9: 0.04}, counted=EVERY)
    assert found.stall_s == pytest.approx(0.04)
    assert found.gap_s == pytest.approx(0.05)
    assert found.other_s == pytest.approx(0.02)
    assert found.step_s == pytest.approx(1 + 0.05 / EVERY)
    assert found.compute_s == pytest.approx(0.9)


def test_a_job_that_did_not_come_to_its_end_gives_no_figure() -> None:
    member = a_member(slow={})
    del member.advanced_s[WARM - 1 + EVERY]
    with pytest.raises(ValueError, match="every member to go on"):
        overhead.timed([member], written={}, counted=EVERY)


def test_overheads_are_ratios_of_the_same_turn() -> None:
    def job(step_s: float, stall_s: float = 0.0) -> Timed:
        return Timed(step_s=step_s, compute_s=1.0, stall_s=stall_s, gap_s=0.0, other_s=0.0, checkpoints=1)

    turns = {"b0": [job(1.0), job(2.0)], "b1": [job(1.1), job(2.2)], "durable": [job(2.2, 0.22), job(4.4, 0.44)]}
    turns |= {"b0_between": [job(1.0), job(1.0)], "b1_between": [job(1.2), job(1.2)]}
    found = overhead.compared(turns, Load(layers=20))
    assert found["overhead_b1"] == pytest.approx(1.1)
    assert found["overhead_b1_between"] == pytest.approx(1.2)
    assert found["overhead_durable"] == pytest.approx(2.0)
    assert found["durable_stall"] == pytest.approx(0.1)
    assert "overhead_b2" not in found


def test_layers_wait_a_third_of_their_time_in_the_forward_and_two_thirds_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[tuple[str, float]] = []
    monkeypatch.setattr(window_train.time, "sleep", lambda s: waited.append((phase, s)))
    model = torch.nn.Sequential(*(window_train.Paced(0.3) for _ in range(2)))
    landed = [len(waited)]
    for layer in model:
        layer.bias.register_post_accumulate_grad_hook(lambda _: landed.append(len(waited)))
    phase = "forward"
    loss = model(torch.ones(1, window_train.WIDTH)).sum()
    phase = "backward"
    loss.backward()
    assert waited == [("forward", pytest.approx(0.1))] * 2 + [("backward", pytest.approx(0.2))] * 2
    assert landed == [0, 3, 4]  # each layer's gradient comes behind its own wait


def test_a_copys_delay_is_of_micro_batches_from_the_first_copy_to_the_last() -> None:
    member = Member(id="m0", copied_s=[4.3, 4.4, 6.2])
    for step in range(12):
        copying, late = step in (4, 5, 6), step > 8
        ended_s = step + (0.55 if copying else 0.9 if late or step == 0 else 0.5)
        member.micro_batches.append(MicroBatch(step=step, index=0, run=0, started_s=float(step), ended_s=ended_s))
    found = copies.beside(member)
    assert found is not None
    assert (found.copying, found.before) == (pytest.approx([0.55] * 3), pytest.approx([0.5] * 3))
    assert found.after == pytest.approx([0.5] * 2), "the steps next to the copies, whatever the load is later"
    assert (found.delay, found.delay_before) == (pytest.approx(0.1), pytest.approx(0.1))


def test_who_copied_nothing_while_it_computed_says_nothing_of_delays() -> None:
    member = a_member(slow={})
    assert copies.beside(member) is None
    member.copied_s += [3.94, 3.95]  # between the micro-batches of two steps
    assert copies.beside(member) is None
