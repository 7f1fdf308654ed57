"""The machine cannot be made where an event or a message has no handler, or two; a part that is listed is asked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles, joined
from elastrain.member.member_machine import MemberMachine
from elastrain.protocol import messages as said
from tests.unit.member.test_lifecycle import SHAPE, Pair


@dataclass(frozen=True)
class Planted:
    """An event, or a message, that no part handles."""


@pytest.mark.parametrize(("module", "union"), [(p, "Event"), (said, "Message")])
def test_a_type_without_a_handler_is_found_at_construction(
    module: object, union: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, union, getattr(module, union) | Planted)
    with pytest.raises(TypeError, match="Planted: no part handles this"):
        MemberMachine(me="a", shape=SHAPE)


class First(MemberPart):
    @handles(Planted)
    def on_planted(self, message: Planted, source: str) -> None:
        self.heard = (message, source)


class Second(MemberPart):
    @handles(Planted)
    def on_planted(self, event: Planted) -> None: ...


def test_two_handlers_of_a_type_are_found() -> None:
    with pytest.raises(TypeError, match=r"Planted has two handlers, First.on_planted and Second.on_planted"):
        joined([Planted], [First(), Second()])


def test_a_handler_of_a_message_takes_what_it_names() -> None:
    part = First()
    joined([Planted], [part])[Planted].hear(source="b", message=Planted(), payload=None)
    assert part.heard == (Planted(), "b")


def test_every_part_is_in_the_list_that_the_machine_asks() -> None:
    machine = MemberMachine(me="a", shape=SHAPE).machine
    made = [each for owner in (machine, machine.step, machine.custody) for each in vars(owner).values()]
    parts = {type(each).__name__ for each in made if MemberPart in type(each).__mro__}
    assert parts <= {type(each).__name__ for each in machine.parts}


def test_a_member_that_does_not_vote_says_why() -> None:
    pair = Pair()
    assert pair.a.why_not_yet() == "a change of the view is under way"
    pair.start(ready=False)
    assert pair.a.why_not_yet() == "the parameters of step -1 are not compared yet with those that were published"
    pair = Pair()
    pair.start()
    unfinished = "the gradient of shard 0 lacks 1 of 1 runs, such as 0"
    assert pair.a.machine.step.reduction.why_unfinished(0) == unfinished
    assert pair.b.why_not_yet() == "no vote of a yet", "it has no shard of its own, and has voted"
    pair.a.machine.custody.repair.begin_anew("something")
    assert "something of the step was found to be wrong" in pair.a.machine.custody.repair.why_not_yet()
