"""comm/groups/members.py against a plain model: every message goes to one receive that awaits it, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastrain.comm.groups.members import Address, Mailbox

sources = st.sampled_from(["a", "b"])
events = st.lists(st.tuples(st.booleans(), sources, st.booleans(), st.integers(0, 1), st.integers(0, 1)), max_size=40)


@given(events)
def test_messages_and_receives_meet_once_and_in_order(script: list[tuple[bool, str, bool, int, int]]) -> None:
    box: Mailbox[int, int] = Mailbox()
    met: list[tuple[int, int]] = []  # (message, receive), by their numbers in the script
    addresses: dict[int, Address] = {}
    for number, (is_message, source, anybody, tag, group) in enumerate(script):
        if is_message:
            addresses[number] = Address(group=group, source=source, tag=tag)
            receive = box.put(addresses[number], number)
            if receive is not None:
                met.append((number, receive))
        else:
            addresses[number] = Address(group=group, source=None if anybody else source, tag=tag)
            found = box.take(addresses[number], number)
            if found is not None:
                met.append((found[1], number))
    assert all(addresses[receive].awaits(addresses[message]) for message, receive in met)
    assert len({message for message, _ in met}) == len({receive for _, receive in met}) == len(met)
    # Nobody who could be served is left, and messages of one address are read in the order in which they came.
    assert not any(awaited.awaits(sent) for sent, _ in box.messages for awaited, _ in box.receives)
    kept = {message for _, message in box.messages}
    for message, _ in met:
        assert not any(addresses[other] == addresses[message] and other < message for other in kept)
    assert sorted(box.clear()) == sorted(n for n, s in enumerate(script) if not s[0] and n not in {r for _, r in met})
