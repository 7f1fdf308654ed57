"""What one member has completed, all who had begun it complete, whatever views follow and however slow they are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.comm.shared_executor_model import KINDS, Act, Member, Play

NAMES = "abc"


@st.composite
def _acts(draw: st.DrawFn) -> tuple[Act, ...]:
    """Three views; c may be left out of the last ones, and anybody out of the group in the middle."""
    left_out_from = draw(st.sampled_from([2, 3, 4, 4]))
    acts = [Act(view=NAMES, group=NAMES, kinds=())]
    for generation in (1, 2, 3):
        view = NAMES if generation < left_out_from else NAMES.replace("c", "")
        group = "".join(draw(st.permutations(view)))
        if generation == 2 and draw(st.booleans()):
            group = group[:2]
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=int(generation != 2), max_size=2))
        acts.append(Act(view=view, group=group, kinds=tuple(kinds)))
    return tuple(acts)


@pytest.mark.slow
@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(
    acts=_acts(),
    paces=st.tuples(*[st.sampled_from([1, 5, 25])] * len(NAMES)),
    edits=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 1 << 32),
)
def test_what_one_member_has_completed_all_complete_and_no_result_is_wrong(
    acts: tuple[Act, ...], paces: tuple[int, ...], edits: int, seed: int
) -> None:
    Play(acts=acts).run(paces=dict(zip(NAMES, paces, strict=True)), edits=edits, generator=random.Random(seed))


def test_who_was_removed_while_its_generation_was_opened_is_not_waited_for_in_the_next() -> None:
    acts = [
        Act(view=view, group=view, kinds=kinds)
        for view, kinds in ((NAMES, ()), (NAMES, ("barrier",)), ("ab", ("barrier",)))
    ]
    play = Play(acts=tuple(acts))
    a, b, c = (play.members.setdefault(name, Member(play, name)) for name in NAMES)
    try:
        for member in (a, b, c):
            member.edit()
        while not a.letters:
            b.player.step()  # until it has shown its rings, and waits for those of the others
        for member in [a, c, b] * 20:
            member.hear()
            if member is not b:
                member.player.step()
        b.edit()  # what it waits for is all there: it finds the former generation open, after the view has changed
        for _ in range(500):
            for member in (a, b):
                member.hear()
                if not member.player.done:
                    member.player.step()
        assert a.player.done and b.player.done, "c, which is in no view any more, is waited for"
    finally:
        for member in (a, b, c):
            member.player.end()
            member.executor.close()
