"""comm/groups/mailbox.py against a plain model: every letter goes to one reader that awaits it, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastrain.comm.groups.mailbox import Address, Mailbox

sources = st.sampled_from(["a", "b"])
events = st.lists(st.tuples(st.booleans(), sources, st.booleans(), st.integers(0, 1), st.integers(0, 1)), max_size=40)


@given(events)
def test_letters_and_readers_meet_once_and_in_order(script: list[tuple[bool, str, bool, int, int]]) -> None:
    box: Mailbox[int, int] = Mailbox()
    met: list[tuple[int, int]] = []  # (letter, reader), by their numbers in the script
    addresses: dict[int, Address] = {}
    for number, (is_letter, source, anybody, tag, group) in enumerate(script):
        if is_letter:
            addresses[number] = Address(group=group, source=source, tag=tag)
            reader = box.put(addresses[number], number)
            if reader is not None:
                met.append((number, reader))
        else:
            addresses[number] = Address(group=group, source=None if anybody else source, tag=tag)
            found = box.take(addresses[number], number)
            if found is not None:
                met.append((found[1], number))
    assert all(addresses[reader].awaits(addresses[letter]) for letter, reader in met)
    assert len({letter for letter, _ in met}) == len({reader for _, reader in met}) == len(met)
    # Nobody who could be served is left, and letters of one address are read in the order in which they came.
    assert not any(awaited.awaits(sent) for sent, _ in box.letters for awaited, _ in box.readers)
    kept = {letter for _, letter in box.letters}
    for letter, _ in met:
        assert not any(addresses[other] == addresses[letter] and other < letter for other in kept)
    assert sorted(box.clear()) == sorted(n for n, s in enumerate(script) if not s[0] and n not in {r for _, r in met})
