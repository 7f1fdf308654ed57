"""What happened in a run, in sentences, and at the end the proof that nothing was lost. Journals in, words out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastrain.job.batch import DataOrder
from experiments.journals import Member, Run
from experiments.recovery import figures


@dataclass(frozen=True, kw_only=True)
class Sentence:
    at_s: float
    text: str
    tone: str = ""
    """"lost", "back" or nothing."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of the proof. `holds` is None where it only informs."""

    what: str
    found: str
    holds: bool | None = None


def kill_times_s(run: Run) -> dict[str, float]:
    """Member -> when it killed itself on request."""
    return {member.id: member.faults[0].at_s for member in run.members.values() if member.faults}


def what_was_killed(run: Run, member: str) -> str:
    """The member alone, or its node with it."""
    node = run.nodes[member]
    others = [m for m in run.lost_nodes_s if run.nodes[m] == node and m != member]
    return f"{node} with {' '.join([member, *others])}" if member in run.lost_nodes_s else member


def sentences(run: Run) -> list[Sentence]:
    """Everything worth telling so far, in the order of time."""
    told = [Sentence(at_s=view.at_s, text=f"{len(view.members)} members train") for view in run.views[:1]]
    for member in run.members.values():
        told += [
            Sentence(
                at_s=fault.at_s,
                text=f"{what_was_killed(run, member.id)} is killed in {fault.phase} of step {fault.step}",
                tone="lost",
            )
            for fault in member.faults[:1]
        ]
    for name, killed_s in kill_times_s(run).items():
        told += _went_on(run, name, killed_s)
    for name, of in run.replaces.items():
        where = f" on {run.nodes[name]}, which is back" if of in run.lost_nodes_s else ""
        told.append(Sentence(at_s=run.started_s[name], text=f"{name} is started in the place of {of}{where}"))
        view = run.first_view_with(name)
        if view is not None:
            told.append(Sentence(at_s=view.at_s, text=f"{name} is in: {' '.join(view.members)}", tone="back"))
    return sorted(told, key=lambda sentence: sentence.at_s)


def _went_on(run: Run, victim: str, killed_s: float) -> list[Sentence]:
    try:
        loss = figures.loss_of(run, victim, killed_s, runs=1)
    except ValueError:  # not all have resumed yet
        return []
    view = run.view_without(victim)
    assert view is not None
    known, again = _ms(loss.detect_s), _ms(loss.resumed_s - killed_s)
    text = f"{' '.join(view.members)} knew after {known} and went on after {again}"
    return [Sentence(at_s=loss.resumed_s, text=text)]


def proof(run: Run, alone: Member, order: DataOrder, *, steps: int, held_out: tuple[str, str]) -> list[Claim]:
    """What the demo promises, checked. `held_out` are the losses of this run and of the undisturbed one, as printed."""
    members = list(run.members.values())
    lost = figures.steps_lost(members) + len(figures.uncommitted(members, steps))
    wrong = figures.wrong_samples([*members, alone], order)
    return [
        *(claim for name, at_s in kill_times_s(run).items() for claim in _of_kill(run, name, at_s)),
        Claim(what="steps lost", found=f"{lost} of {steps}", holds=lost == 0),
        Claim(what="samples used twice or never", found=_samples(wrong, order, steps), holds=not wrong),
        _same_parameters(members, alone),
        Claim(what="held-out loss", found=f"{held_out[0]}, undisturbed {held_out[1]}", holds=_same(*held_out)),
    ]


def _of_kill(run: Run, name: str, killed_s: float) -> list[Claim]:
    fault = run.members[name].faults[0]
    found = f"in {fault.phase} of step {fault.step}, {killed_s - run.views[0].at_s:.1f} s after the start"
    claims = [Claim(what=f"{what_was_killed(run, name)} killed", found=found)]
    try:
        loss = figures.loss_of(run, name, killed_s, runs=1)
    except ValueError as error:
        return [*claims, Claim(what="", found=str(error), holds=False)]
    usual = ordinary_standstill_s(run)
    beside = "" if usual is None else f"; {_ms(usual)} between any two steps"
    went_on = f"the others knew after {_ms(loss.detect_s)} and went on after {_ms(loss.resumed_s - killed_s)}"
    claims.append(Claim(what="", found=went_on))
    claims.append(Claim(what="", found=f"nobody computed for {_ms(loss.standstill_s)} at most{beside}"))
    return [*claims, _came_back(run, name)]


def _came_back(run: Run, name: str) -> Claim:
    newcomer = next((new for new, old in run.replaces.items() if old == name), None)
    view = run.first_view_with(newcomer) if newcomer else None
    if newcomer is None or view is None:
        return Claim(what="", found=f"{newcomer or 'its place'} was still warming up at the end")
    return Claim(what="", found=f"back as {newcomer} {view.at_s - run.started_s[newcomer]:.0f} s later")


def _same_parameters(members: Sequence[Member], alone: Member) -> Claim:
    ends = {member.id: member.digest for member in members if member.digest is not None}
    digests = sorted({digest for digest in ends.values() if digest is not None})
    equal = alone.digest is not None and digests == [alone.digest]
    there = f"{' and '.join(digests) or 'nothing'} on {' '.join(ends) or 'nobody'}"
    found = f"{there}; undisturbed {alone.digest}"
    return Claim(what="parameters, bit for bit" if equal else "parameters differ", found=found, holds=equal)


def _same(first: str, second: str) -> bool:
    return first == second != "none"


def ordinary_standstill_s(run: Run) -> float | None:
    """The median time in which no member computes between two undisturbed steps."""
    found = [gap for view in run.views for gap in figures.undisturbed_standstills_s(run, view)]
    return median(found) if found else None


def _samples(wrong: Sequence[int], order: DataOrder, steps: int) -> str:
    if wrong:
        return f"the samples of steps {', '.join(map(str, wrong))} are not those of the data order"
    return f"0 of {steps * order.global_batch_size:,}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
