"""Whole jobs, members and agents together, under faults of every kind; and schedules that once broke something."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.job.batch import PIECE, simulate
from tests.sim.job.plants import PLANTS
from tests.sim.job.schedule import draw, from_text, to_text
from tests.sim.job.shrink import failure_of
from tests.sim.job.world import World

SCHEDULES, CHUNK = 2000, 250


@pytest.mark.timeout(1200)  # ten seconds on a quiet core; a loaded machine takes its time
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_each_job_commits_parks_or_ends_with_a_sentence(first: int) -> None:
    ended: Counter[str] = Counter()
    for some, broken in map(simulate, range(first, first + CHUNK, PIECE)):
        again = "; ".join(f"python -m tests.sim.job.replay {seed} --shrink" for seed, _ in broken)
        assert broken == [], again
        ended += some
    assert ended["schedules"] == CHUNK
    assert ended["finished"] >= 0.7 * CHUNK, ended
    assert ended["faults"] >= CHUNK, ended


def test_a_schedule_is_a_value_that_replays() -> None:
    for seed in range(8):
        schedule = from_text(to_text(draw(seed)))
        assert schedule == draw(seed)
        lines: list[list[str]] = [[], []]
        for told in lines:
            World(schedule, told.append).run()
        assert lines[0] == lines[1]


FOUND = {
    "a node that was away until the job was done begins it again alone": (
        '{"seed":31,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"slow_store":0,'
        '"faults":[{"type":"Isolate","at_s":2.0,"node":0,"for_s":7.0,"store":true}]}'
    ),
    "a node that slept until the job was done puts a view of its own": (
        '{"seed":620,"nodes":3,"backups":0,"steps":1,"runs":4,"one_host":true,'
        '"faults":[{"type":"Pause","at_s":3.922,"who":3,"for_s":13.0,"is_node":true}]}'
    ),
    "a node whose store lost its data before it had heard of much takes the keys for removed": (
        '{"seed":2026340,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Cut","at_s":0.3,"node":0,"other":-1,"for_s":0.6,"both":true},'
        '{"type":"Wipe","at_s":1.4,"for_s":4.0}]}'
    ),
    "an agent that hears late of the first commit begins the job anew": (
        '{"seed":808,"nodes":3,"backups":0,"steps":2,"runs":1,"one_host":true,"slow_store":2,'
        '"faults":[{"type":"KillAll","at_s":1.237,"spread_s":1.5,"again_s":2.19}]}'
    ),
    "a node takes a store that has lost its data for the end of the job": (
        '{"seed":529,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,'
        '"faults":[{"type":"Wipe","at_s":3.0,"for_s":4.0},{"type":"KillNode","at_s":3.433,"node":5}]}'
    ),
    "a node that comes to a store without its data makes another roster, and ids are used twice": (
        '{"seed":437,"nodes":2,"backups":1,"steps":3,"runs":1,"faults":['
        '{"type":"KillNode","at_s":1.898,"node":6,"again_s":3.0},'
        '{"type":"Cut","at_s":2.0,"node":0,"other":-1,"for_s":7.0},{"type":"Wipe","at_s":5.0,"for_s":4.0}]}'
    ),
    "the end of the job is heard while a proposal is under way, and forgotten": (
        '{"seed":859,"nodes":4,"backups":2,"steps":4,"runs":4,"one_host":true,"faults":['
        '{"type":"Isolate","at_s":3.378,"node":1,"for_s":5.0,"store":true},'
        '{"type":"Pause","at_s":4.727,"who":3,"for_s":2.43},'
        '{"type":"Slow","at_s":6.436,"node":3,"other":6,"factor":20.0,"for_s":2.0}]}'
    ),
    "a suspicion is judged once, while the store does not answer": (
        '{"seed":2924,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Reset","at_s":1.375,"who":1,"other":0},{"type":"StoreAway","at_s":2.0,"for_s":1.0}]}'
    ),
    "a node that was away takes a member's number from a store without its job": (
        '{"seed":4602,"nodes":1,"workers":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Isolate","at_s":1.792,"node":0,"for_s":13.0,"store":true},{"type":"Join","at_s":2.736},'
        '{"type":"Raise","at_s":2.918,"who":0}]}'
    ),
    "a node that slept through the whole job puts its first view": (
        '{"seed":7763,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Pause","at_s":3.0,"who":5,"for_s":13.0,"is_node":true}]}'
    ),
    "a fresh node takes a number between the roster and the count that are put again": (
        '{"seed":46681,"nodes":4,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Join","at_s":2.379},'
        '{"type":"Cut","at_s":2.485,"node":5,"other":-1,"for_s":3.0,"both":true},'
        '{"type":"Wipe","at_s":3.0,"for_s":1.0},'
        '{"type":"KillNode","at_s":3.168,"node":1,"again_s":1.0,"is_silent":false,"agent_only":false}]}'
    ),
    "a newcomer puts a first view of its own into a store that has lost the one that stood": (
        '{"seed":308953,"nodes":3,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"StoreAway","at_s":1.0,"for_s":2.0,"restarts":true},{"type":"Wipe","at_s":4.0,"for_s":1.0},'
        '{"type":"Preempt","at_s":5.0,"node":7,"again_s":0.5}]}'
    ),
    "the keys are gone, and as many written since, when the first view is proposed, and nobody proposes it again": (
        '{"seed":348346,"nodes":2,"workers":1,"backups":0,"steps":2,"runs":4,"one_host":true,"faults":['
        '{"type":"StoreAway","at_s":0.656,"for_s":0.72,"restarts":true},{"type":"Wipe","at_s":2.926,"for_s":0.1}]}'
    ),
    "a worker's place waits for a number that nobody gives any more, and its node for the worker": (
        '{"seed":22718,"nodes":2,"workers":2,"backups":0,"steps":3,"runs":1,"resumes":1,"faults":['
        '{"type":"Isolate","at_s":5.0,"node":0,"for_s":11.0,"store":true},'
        '{"type":"Pause","at_s":10.0,"who":0,"for_s":4.0,"is_node":false}]}'
    ),
    "a node that slept goes on in a store without data, though others have gone on without it and ended": (
        '{"seed":20066,"nodes":3,"backups":0,"steps":3,"runs":3,"one_host":true,"faults":['
        '{"type":"KillNode","at_s":1.0,"node":3,"is_silent":true,"agent_only":true},'
        '{"type":"Pause","at_s":4.855,"who":0,"for_s":5.0,"is_node":true},{"type":"Compact","at_s":7.0},'
        '{"type":"Wipe","at_s":9.0,"for_s":1.0}]}'
    ),
    "a node that was away in the whole job goes on in the one that begins under its name, with the old roster": (
        '{"seed":45025,"nodes":3,"backups":0,"steps":2,"runs":1,"one_host":true,"faults":['
        '{"type":"Isolate","at_s":1.0,"node":3,"for_s":8.0,"store":true},'
        '{"type":"Isolate","at_s":2.312,"node":3,"for_s":0.0,"store":false},'
        '{"type":"Preempt","at_s":6.0,"node":1,"again_s":4.0}]}'
    ),
    "a node that is told to go takes the keys of one that sleeps along, before the first view": (
        '{"seed":51357,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Pause","at_s":2.467,"who":6,"for_s":3.0,"is_node":true},'
        '{"type":"Preempt","at_s":5.0,"node":1,"again_s":null}]}'
    ),
    "a node that is told to go takes the keys of one that sleeps along, in a view": (
        '{"seed":19985,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Pause","at_s":1.0,"who":0,"for_s":12.0,"is_node":false},'
        '{"type":"Pause","at_s":3.604,"who":1,"for_s":6.0,"is_node":true},'
        '{"type":"Preempt","at_s":4.0,"node":2,"again_s":null}]}'
    ),
    "who has dialled before the others heard of it is not told the end, and begins the work anew": (
        '{"seed":43806,"nodes":3,"backups":1,"steps":6,"runs":3,"one_host":true,"slow_store":2,"resumes":1,"faults":['
        '{"type":"StoreTorn","at_s":4.406,"for_s":5.0},{"type":"Join","at_s":6.354},'
        '{"type":"Wipe","at_s":6.462,"for_s":4.0}]}'
    ),
    "a node that comes back takes a last holder for dead that has not heard of it yet, and ends a whole job": (
        '{"seed":84501,"nodes":2,"workers":1,"backups":1,"steps":3,"runs":3,"one_host":true,"check_every":0,"faults":['
        '{"type":"KillNode","at_s":4.93,"node":1,"again_s":4.0,"is_silent":true},'
        '{"type":"Cut","at_s":6.811,"node":0,"other":-1,"for_s":2.0,"both":true}]}'
    ),
    "a member that is told to go counts on holders that may be dead, while its view changes": (
        '{"seed":16993,"nodes":3,"workers":1,"backups":1,"steps":2,"runs":3,"one_host":false,"check_every":0,"slo'
        'w_store":-1,"slow_behind":false,"resumes":-1,"checkpoint_every":0,"no_room":false,"faults":[{"type":"Rai'
        'se","at_s":2.0,"who":7},{"type":"Isolate","at_s":3.0,"node":2,"for_s":12.0,"store":true},{"type":"Preemp'
        't","at_s":4.0,"node":3,"again_s":4.0}]}'
    ),
    "a member that is told to go looks for the node of a holder that is not in the view": (
        '{"seed":14482,"nodes":4,"workers":1,"backups":1,"steps":3,"runs":2,"one_host":false,"check_every":2,"slo'
        'w_store":-1,"slow_behind":false,"resumes":null,"checkpoint_every":0,"no_room":false,"faults":[{"type":"C'
        'ut","at_s":1.12,"node":5,"other":1,"for_s":12.48,"both":true},{"type":"Kill","at_s":3.088,"who":7,"phase'
        '":"quiesce","sends":1},{"type":"KillNode","at_s":4.213,"node":1,"again_s":1.05,"is_silent":true,"agent_o'
        'nly":true},{"type":"Preempt","at_s":6.488,"node":5,"again_s":null},{"type":"Preempt","at_s":6.795,"node"'
        ':3,"again_s":null}]}'
    ),
    "a roster that was made before the store lost its data is put into it, although another stood meanwhile": (
        '{"seed":119980,"nodes":3,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"slow_store":2,"faults":['
        '{"type":"Cut","at_s":1.0,"node":1,"other":0,"for_s":1.0,"both":true},{"type":"Join","at_s":1.0},'
        '{"type":"Wipe","at_s":2.0,"for_s":1.0}]}'
    ),
    "a roster that was made before the store lost its data says to its own nodes that the job is over": (
        '{"seed":142557,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"StoreTorn","at_s":0.0,"for_s":2.0},{"type":"Compact","at_s":0.453},'
        '{"type":"Wipe","at_s":0.682,"for_s":0.1}]}'
    ),
    "fresh nodes put another roster into a store that has lost its data": (
        '{"seed":15449,"nodes":2,"workers":1,"backups":0,"steps":3,"runs":2,"one_host":true,"check_every":1,"faults":['
        '{"type":"Wipe","at_s":2.586,"for_s":4.0},'
        '{"type":"KillNode","at_s":3.158,"node":1,"again_s":2.0,"is_silent":true},{"type":"Join","at_s":5.0}]}'
    ),
    "a last holder's lease ends, and it is back in the store before another node has ended the job": (
        '{"seed":170706,"nodes":2,"workers":1,"backups":1,"steps":1,"runs":1,"one_host":false,"check_every":0,"slow_store":0,'
        '"slow_behind":false,"resumes":-1,"checkpoint_every":0,"local_disks":false,"no_room":false,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":0,"for_s":10.0,"store":false},'
        '{"type":"Cut","at_s":6.442,"node":1,"other":-1,"for_s":2.69,"both":true},{"type":"Raise","at_s":7.321,"who":6}]}'
    ),
    "a last holder's lease ends, it comes back, and its node's word counts again: a replacement joins it": (
        '{"seed":170706,"nodes":2,"workers":1,"backups":1,"steps":8,"runs":1,"one_host":false,"check_every":0,"slow_store":0,'
        '"slow_behind":false,"resumes":-1,"checkpoint_every":0,"local_disks":false,"no_room":false,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":0,"for_s":8.5,"store":false},'
        '{"type":"Cut","at_s":6.442,"node":1,"other":-1,"for_s":2.69,"both":true},{"type":"Raise","at_s":7.321,"who":6}]}'
    ),
    "the time to wait for who may know of a lost first view is over, and nobody looks again": (
        '{"seed":507713,"nodes":2,"workers":2,"backups":0,"steps":1,"runs":1,"one_host":true,"check_every":0,"faults":['
        '{"type":"Wipe","at_s":1.831,"for_s":4.0},{"type":"Preempt","at_s":6.0,"node":2,"again_s":null}]}'
    ),
    "a checkpoint is still being read where a member already trains on others' copies, and overwrites them": (
        '{"seed":509156,"nodes":2,"workers":1,"backups":1,"steps":4,"runs":1,"one_host":true,"check_every":0,"slow_store":0,"resumes":1,"faults":['
        '{"type":"Kill","at_s":2.0,"who":6,"phase":"","sends":0},'
        '{"type":"Cut","at_s":2.257,"node":1,"other":-1,"for_s":0.3,"both":true},'
        '{"type":"KillHolders","at_s":4.49,"shard":0,"spared":0}]}'
    ),
    "a node that was cut off knows the roster that the store has lost, and a fresh one makes another at once": (
        '{"seed":527191,"nodes":2,"workers":2,"backups":0,"steps":1,"runs":1,"one_host":true,"check_every":0,"slow_store":1,"resumes":-1,"faults":['
        '{"type":"Wipe","at_s":3.0,"for_s":1.0},'
        '{"type":"KillNode","at_s":4.0,"node":1,"again_s":0.95,"is_silent":false,"agent_only":false},'
        '{"type":"Isolate","at_s":4.0,"node":0,"for_s":6.0,"store":true}]}'
    ),
    "a first view is put among the keys that the last node takes along in the same moment": (
        '{"seed":559719,"nodes":2,"workers":2,"backups":1,"steps":5,"runs":3,"one_host":true,"check_every":0,"faults":['
        '{"type":"Isolate","at_s":1.197,"node":0,"for_s":8.87,"store":true}]}'
    ),
    "an outage has taken all keys, and who reads the store first takes the others for dead": (
        '{"seed":681697,"nodes":3,"workers":1,"backups":0,"steps":2,"runs":1,"one_host":true,"check_every":0,"faults":['
        '{"type":"StoreAway","at_s":2.585,"for_s":5.0,"restarts":false},{"type":"Join","at_s":6.0},'
        '{"type":"Isolate","at_s":6.136,"node":2,"for_s":2.32,"store":false}]}'
    ),
    "the roster comes again with a count of members that another node knows to be too low, and a number is taken": (
        '{"seed":717116,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"slow_store":1,"faults":['
        '{"type":"KillNode","at_s":1.0,"node":1,"again_s":2.0,"is_silent":false,"agent_only":false},'
        '{"type":"StoreAway","at_s":1.435,"for_s":0.51,"restarts":true},{"type":"Join","at_s":2.0},'
        '{"type":"Wipe","at_s":3.084,"for_s":1.0}]}'
    ),
    "a node that reaches no other takes one for dead that has only lost the store, and ends the job": (
        '{"seed":1200379,"nodes":3,"workers":1,"backups":1,"steps":3,"runs":4,"one_host":false,"check_every":0,'
        '"slow_store":-1,"slow_behind":false,"resumes":null,"checkpoint_every":0,"local_disks":false,"no_room":false,'
        '"faults":[{"type":"Isolate","at_s":2.0,"node":3,"for_s":8.0,"store":false},'
        '{"type":"Kill","at_s":3.0,"who":7,"phase":"publish","sends":0},'
        '{"type":"Pause","at_s":4.0,"who":2,"for_s":3.0,"is_node":false},'
        '{"type":"Cut","at_s":4.47,"node":1,"other":-1,"for_s":7.0,"both":true}]}'
    ),
    "a roster that stands is taken for one that was put again, and a job that is over for lost data": (
        '{"seed":1312360,"nodes":3,"workers":1,"backups":0,"steps":3,"runs":1,"one_host":true,"check_every":1,"slow_store":2,'
        '"slow_behind":false,"resumes":null,"checkpoint_every":0,"local_disks":false,"no_room":false,'
        '"faults":[{"type":"Isolate","at_s":3.57,"node":0,"for_s":5.0,"store":true}]}'
    ),
    "a node that was cut off while the store lost its data begins a job anew that others have put again and ended": (
        '{"seed":7,"nodes":3,"workers":1,"backups":1,"steps":1,"runs":2,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":1,"for_s":6.0,"store":true},{"type":"Wipe","at_s":4.5,"for_s":0.1}]}'
    ),
    "a view that a node has heard of by a link alone, and that the store has lost, is not put again": (
        '{"seed":13,"nodes":2,"workers":1,"backups":1,"steps":2,"runs":2,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":0,"for_s":12.0,"store":true},{"type":"Wipe","at_s":4.6,"for_s":0.1}]}'
    ),
    "who has put a view after its lease had ended is taken for dead by that lease, and the job is ended": (
        '{"seed":1607,"nodes":3,"workers":1,"backups":1,"steps":3,"runs":2,"faults":['
        '{"type":"Cut","at_s":1.46,"node":2,"other":-1,"for_s":8.0,"both":true},'
        '{"type":"Isolate","at_s":1.917,"node":4,"for_s":38.0,"store":false},'
        '{"type":"StoreAway","at_s":2.612,"for_s":3.0,"restarts":true}]}'
    ),
    "a node that another never reached may have ended the job since the store lost its data": (
        '{"seed":64,"nodes":2,"workers":1,"backups":2,"steps":2,"runs":1,"one_host":false,"slow_store":0,"faults":['
        '{"type":"Isolate","at_s":0.548,"node":0,"for_s":39.18,"store":true},'
        '{"type":"Wipe","at_s":3.767,"for_s":1.0}]}'
    ),
    "a node that missed the first view puts another beside it, once the store has lost it": (
        '{"seed":5113,"nodes":3,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Isolate","at_s":1.407,"node":4,"for_s":4.0,"store":true},{"type":"Wipe","at_s":3.919,"for_s":1.0},'
        '{"type":"KillNode","at_s":4.0,"node":2,"again_s":null,"is_silent":true,"agent_only":false},'
        '{"type":"StoreAway","at_s":7.0,"for_s":7.0,"restarts":true}]}'
    ),
    "what the network has held of a node that has ended the job since makes another begin it anew": (
        '{"seed":22694,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":false,"slow_store":1,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":2,"for_s":39.58,"store":true},{"type":"Wipe","at_s":5.0,"for_s":1.0}]}'
    ),
    "the last member's node is reached again a moment after its lease, and the job has been ended": (
        '{"seed":1754468,"nodes":2,"workers":1,"backups":1,"steps":3,"runs":3,"one_host":true,"resumes":-1,"faults":['
        '{"type":"Compact","at_s":0.145},{"type":"Isolate","at_s":4.224,"node":0,"for_s":2.87,"store":true},'
        '{"type":"KillHolders","at_s":6.595,"shard":1,"spared":1}]}'
    ),
    "who makes the first commits where nobody, nor the store, hears of them goes on alone, and others begin anew": (
        '{"seed":1331243,"nodes":2,"workers":1,"backups":0,"steps":5,"runs":2,"one_host":true,"faults":['
        '{"type":"Pause","at_s":3.482,"who":6,"for_s":12.0},'
        '{"type":"Isolate","at_s":6.446,"node":6,"for_s":13.0,"store":true}]}'
    ),
}
"""What the simulator has found in the product, each shrunk to the schedule that shows it."""

MISTAKEN = {
    "a node that slept takes the one before its successor for dead, of which it has not heard": (
        '{"seed":1403286,"nodes":3,"workers":1,"backups":2,"steps":5,"runs":2,"one_host":true,"slow_store":1,"faults":['
        '{"type":"Preempt","at_s":4.32,"node":7,"again_s":0.5},'
        '{"type":"Pause","at_s":4.4352,"who":2,"for_s":8.0,"is_node":true}]}'
    ),
    "a number is used again that the store has lost, and all but one that was cut off when it was taken": (
        '{"seed":41550,"nodes":2,"workers":2,"backups":1,"steps":3,"runs":1,"one_host":false,"faults":['
        '{"type":"Isolate","at_s":1.795,"node":5,"for_s":7.0,"store":true},'
        '{"type":"Kill","at_s":2.678,"who":2,"phase":"","sends":0},{"type":"Wipe","at_s":4.268,"for_s":1.0},'
        '{"type":"KillNode","at_s":5.0,"node":2,"again_s":4.77,"is_silent":false,"agent_only":false}]}'
    ),
    "a node that comes while another is isolated reaches that no more than the others": (
        '{"seed":25256,"nodes":2,"workers":1,"backups":1,"steps":3,"runs":3,"one_host":false,"faults":['
        '{"type":"Isolate","at_s":3.358,"node":0,"for_s":18.0,"store":true},{"type":"Wipe","at_s":6.0,"for_s":0.0},'
        '{"type":"Join","at_s":6.0}]}'
    ),
    "who has dialled early is not told that the other has left": (
        '{"seed":17910,"nodes":2,"workers":1,"backups":0,"steps":3,"runs":3,"one_host":true,"check_every":0,"slow'
        '_store":-1,"slow_behind":false,"resumes":null,"checkpoint_every":0,"no_room":false,"faults":[{"type":"Is'
        'olate","at_s":0.626,"node":1,"for_s":6.0,"store":true},{"type":"StoreAway","at_s":4.713,"for_s":3.0,"res'
        'tarts":true}]}'
    ),
    "a lease from before the store's loss is another's afterwards": (
        '{"seed":12811,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Wipe","at_s":0.523,"for_s":1.0},{"type":"KillAll","at_s":4.0,"spread_s":2.0},'
        '{"type":"Join","at_s":4.0}]}'
    ),
    "the only holder is on a node without a lease that nobody reaches": (
        '{"seed":13322,"nodes":2,"backups":1,"steps":2,"runs":3,"faults":['
        '{"type":"Isolate","at_s":2.0,"node":1,"for_s":3.0,"store":true},'
        '{"type":"Raise","at_s":3.0,"who":2},{"type":"Compact","at_s":4.347}]}'
    ),
    "all nodes die before the first view, the store loses their job, and another begins": (
        '{"seed":12648,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"KillAll","at_s":1.0,"spread_s":0.0,"again_s":2.0},{"type":"Wipe","at_s":3.0,"for_s":1.0}]}'
    ),
    "a number is used again that the store has lost, and all who knew it": (
        '{"seed":70951,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"slow_store":1,"resumes":-1,"faults":['
        '{"type":"Compact","at_s":2.0},{"type":"Wipe","at_s":5.0,"for_s":1.0},'
        '{"type":"KillNode","at_s":5.0,"node":0,"again_s":null,"is_silent":false,"agent_only":true}]}'
    ),
    "a number is used again in an emptied store once all who knew it have gone": (
        '{"seed":58743,"nodes":3,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"StoreAway","at_s":3.0,"for_s":1.0,"restarts":false},{"type":"Wipe","at_s":5.0,"for_s":4.0},'
        '{"type":"KillNode","at_s":7.0,"node":3,"again_s":2.0,"is_silent":false,"agent_only":false},'
        '{"type":"Preempt","at_s":8.0,"node":5,"again_s":0.5},'
        '{"type":"StoreAway","at_s":9.21,"for_s":6.0,"restarts":true},'
        '{"type":"Preempt","at_s":11.0,"node":7,"again_s":0.5}]}'
    ),
    "who has dialled again is not told that the other has left, as long as that one holds on to its predecessor": (
        '{"seed":157503,"nodes":2,"workers":1,"backups":0,"steps":2,"runs":1,"one_host":true,"slow_store":1,"resumes":1,'
        '"faults":[{"type":"KillNode","at_s":1.0,"node":2,"again_s":0.0,"is_silent":true,"agent_only":false},'
        '{"type":"Preempt","at_s":5.0,"node":1,"again_s":null}]}'
    ),
    "a node that came to join has no job any more once the operator has stopped all others": (
        '{"seed":51231,"nodes":2,"backups":0,"steps":1,"runs":1,"one_host":true,"resumes":1,"faults":['
        '{"type":"Pause","at_s":3.0,"who":0,"for_s":10.0,"is_node":false},'
        '{"type":"Preempt","at_s":4.772,"node":1,"again_s":0.5},{"type":"Preempt","at_s":5.0,"node":0,"again_s":0.0},'
        '{"type":"Pause","at_s":5.292,"who":1,"for_s":11.0,"is_node":true}]}'
    ),
    "all nodes that are not cut off were told to go, and one of them begins another job": (
        '{"seed":153026,"nodes":3,"workers":2,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"Isolate","at_s":3.0,"node":4,"for_s":6.0,"store":true},'
        '{"type":"Preempt","at_s":5.56,"node":2,"again_s":0.0},{"type":"Preempt","at_s":5.56,"node":3,"again_s":0.5}]}'
    ),
    "a number is used again that the store has lost, and all but a node that had heard of nothing": (
        '{"seed":550655,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"check_every":0,"faults":['
        '{"type":"Cut","at_s":0.468,"node":0,"other":-1,"for_s":3.0,"both":true},'
        '{"type":"Wipe","at_s":2.414,"for_s":0.1},'
        '{"type":"Cut","at_s":2.554,"node":1,"other":-1,"for_s":2.0,"both":true},'
        '{"type":"KillNode","at_s":4.0,"node":1,"again_s":5.0,"is_silent":false,"agent_only":false}]}'
    ),
    "before the job began, a node was told to go in a store without data, and took the keys along": (
        '{"seed":538227,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"check_every":0,"faults":['
        '{"type":"StoreTorn","at_s":0.0,"for_s":5.0},{"type":"Wipe","at_s":2.0,"for_s":1.0},'
        '{"type":"Preempt","at_s":3.782,"node":2,"again_s":null}]}'
    ),
    "a member goes, and another of its node stays until its own state is elsewhere": (
        '{"seed":59239,"nodes":4,"workers":2,"backups":1,"steps":5,"runs":2,"one_host":true,"slow_store":0,"faults":['
        '{"type":"Kill","at_s":3.0,"who":3,"phase":"reduce","sends":0},'
        '{"type":"KillNode","at_s":5.0,"node":1,"again_s":2.0,"is_silent":false,"agent_only":false},'
        '{"type":"Raise","at_s":6.236,"who":7},{"type":"StoreAway","at_s":6.48,"for_s":3.0,"restarts":true},'
        '{"type":"Preempt","at_s":10.0,"node":0,"again_s":null}]}'
    ),
    "what came to a node while it stood still was heard in another order, as if the store had lost its data": (
        '{"seed":1020717,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":2,"one_host":true,"check_every":0,'
        '"slow_store":-1,"faults":[{"type":"Pause","at_s":0.4,"who":0,"for_s":11.0,"is_node":true},'
        '{"type":"Isolate","at_s":4.0,"node":0,"for_s":2.0,"store":true}]}'
    ),
    "what the network held of a node that has died meanwhile says that it answers, and nothing ends that": (
        '{"seed":935794,"nodes":2,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"check_every":0,'
        '"slow_store":0,"slow_behind":false,"resumes":-1,"checkpoint_every":0,"local_disks":false,"no_room":false,'
        '"faults":[{"type":"Stall","at_s":5.0,"who":2,"for_s":4.0},'
        '{"type":"Cut","at_s":6.0,"node":1,"other":6,"for_s":4.23,"both":true},'
        '{"type":"KillNode","at_s":8.0,"node":1,"is_silent":true}]}'
    ),
    "the last who had heard of a number went as the store lost its data, and it was used again": (
        '{"seed":1311593,"nodes":3,"workers":1,"backups":0,"steps":1,"runs":1,"one_host":true,"faults":['
        '{"type":"StoreAway","at_s":2.122,"for_s":1.0,"restarts":false},{"type":"Raise","at_s":5.0,"who":2},'
        '{"type":"Preempt","at_s":5.683,"node":7,"again_s":4.0},'
        '{"type":"Preempt","at_s":6.0,"node":0,"again_s":4.0},{"type":"Wipe","at_s":6.0,"for_s":1.0}]}'
    ),
    "a node that comes after the job's end begins another job": (
        '{"seed":0,"nodes":2,"backups":1,"steps":2,"runs":1,"faults":['
        '{"type":"Join","at_s":9.0},{"type":"Join","at_s":12.0}]}'
    ),
}
"""What the simulator once took for a defect of the product, and was its own."""


@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_right_is_not_found_wrong(name: str) -> None:
    assert failure_of(from_text(MISTAKEN[name])) == ""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    assert failure_of(from_text(FOUND[name])) == ""


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    assert PLANTS[name].search.find() is not None, PLANTS[name].rule
