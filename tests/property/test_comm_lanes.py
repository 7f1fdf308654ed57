"""What one member has completed, all who had begun it complete, whatever views follow and however slow they are."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.lanes_model import KINDS, Act, Play

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


@settings(max_examples=200, deadline=None)
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
