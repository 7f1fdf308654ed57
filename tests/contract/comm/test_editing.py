"""One edit changes the view and any number of overlapping groups."""

from __future__ import annotations

import itertools
import threading
from typing import Any, get_args

import pytest
import torch

from elastrain.comm.errors import Aborted
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.groups.group import Group
from elastrain.comm.wire.addresses import Peer
from tests.support.comm_tools import Transport
from tests.support.party import Party, party

pytestmark = pytest.mark.parametrize("transport", get_args(Transport))


def _peers(made: Party, names: str) -> list[Peer]:
    return [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in names]


def _sum(group: Group) -> float:
    tensor = torch.full((9000,), float(ord(group.me)))
    group.all_reduce(tensor).wait()
    return float(tensor[-1])


def _total(names: str) -> float:
    return float(sum(map(ord, names)))


def test_lists_take_newcomers_in_and_keep_their_own_order(transport: Transport) -> None:
    with party(transport, 3) as made:
        groups = made.each(lambda comm, rank: comm.group("pair", ["a", "b"]) if rank < 2 else None)
        newcomer = made.add("d").group("pair", ["d"])
        lists = {"pair": ["d", "b"], "unheard of": ["a"]}
        for name in "abd":
            made.comms[name].edit(2, _peers(made, "abd"), lists)
        assert groups[1].members == newcomer.members == ("d", "b") and (newcomer.rank, groups[1].rank) == (0, 1)
        found = made.each(lambda comm, rank: _sum(groups[1] if rank else newcomer), "db")
        assert found == [_total("bd")] * 2
        assert made.each(lambda comm, rank: _sum(comm.world), "abd") == [_total("abd")] * 3


def test_a_hundred_overlapping_groups_follow_one_edit_and_keep_their_identity(transport: Transport) -> None:
    with party(transport, 5) as made:
        lists = {f"group {n}": "".join(c) for n, c in enumerate(itertools.islice(_combinations("abcde"), 100))}
        held: dict[str, dict[str, Group]] = {
            name: {group: comm.group(group, list(members)) for group, members in lists.items() if name in members}
            for name, comm in made.comms.items()
        }
        made.comms.pop("c").close()
        made.view(2, "abde")

        def act(comm: Communicator, rank: int) -> None:
            mine = held["abde"[rank]]
            works = []
            for name, group in mine.items():
                tensor = torch.full((10,), float(ord(group.me)))
                works.append((group.all_reduce(tensor), tensor, lists[name].replace("c", "")))
            for work, tensor, members in works:
                work.wait()
                assert float(tensor[0]) == _total(members)

        assert made.each(act, "abde") == [None] * 4


def _combinations(names: str) -> itertools.chain[tuple[str, ...]]:
    pairs = [list(itertools.combinations(names, size)) for size in (2, 3, 4, 5)]
    return itertools.chain(*pairs * 4)


def test_what_was_under_way_ends_and_is_not_mixed_up_with_the_new_lists(transport: Transport) -> None:
    with party(transport, 3) as made:
        groups = made.each(lambda comm, rank: comm.group("all", ["a", "b", "c"]))
        under_way = groups[0].all_reduce(torch.ones(20_000))  # b and c never join in
        for name in "abc":
            made.comms[name].edit(2, _peers(made, "abc"), {"all": ["c", "a"]})
        with pytest.raises(Aborted, match="the view changed to generation 2"):
            under_way.wait()
        assert made.each(lambda comm, rank: _sum(groups[0 if rank else 2]), "ca") == [_total("ac")] * 2


def test_lists_that_make_no_sense_are_refused_before_anything_changes(transport: Transport) -> None:
    with party(transport, 2) as made:
        comm = made.comms["a"]
        for members in (["a", "x"], ["a", "a"]):
            with pytest.raises(ValueError, match="must list members of the view"):
                comm.edit(2, _peers(made, "ab"), {"group": members})
        assert made.each(lambda comm, rank: _sum(comm.world)) == [_total("ab")] * 2


class _Stopped:
    """Calls of `name` of an object, stopped on their way in until they are let go."""

    def __init__(self, owner: Any, name: str) -> None:
        self.came, self.go = threading.Event(), threading.Event()
        inner = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            self.came.set()
            assert self.go.wait(20)
            return inner(*args, **named)

        setattr(owner, name, call)


def test_what_is_submitted_while_an_edit_is_under_way_belongs_to_the_new_view(transport: Transport) -> None:
    with party(transport, 2) as made:
        a, b = made.comms["a"], made.comms["b"]
        b.edit(2, _peers(made, "ab"))
        stopped = _Stopped(a._executors.shared, "renew")  # in the middle of the edit
        editing = threading.Thread(target=lambda: a.edit(2, _peers(made, "ab")))
        editing.start()
        assert stopped.came.wait(20)
        tensor = torch.ones(10)
        works = [a.world.barrier(), a.world.all_reduce(tensor)]
        stopped.go.set()
        editing.join(20)
        works.append(a.world.barrier(inline=True))  # not before those that were submitted earlier
        b.world.barrier()
        b.world.all_reduce(torch.ones(10))
        b.world.barrier().wait()
        for work in works:
            work.wait()
        assert tensor.tolist() == [2.0] * 10
