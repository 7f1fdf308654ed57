"""Bugs planted into the product, one at a time: each breaks one rule, and whole jobs have to show it.

A plant replaces one rule of one part (it is given the rule that it replaces). The docstring is the rule that it breaks;
the first half are rules of agents and of what lies between them and the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from elastrain import protocol as p
from elastrain.job.values import Recovery
from elastrain.job.world import View
from elastrain.launcher.core.agent_events import ProposalAnswered, WorkerDied
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.failures import Failures
from elastrain.launcher.core.rendezvous import Rendezvous
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.suspicions import Suspicions
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.shared.job_values import Command, NodeRecord, Roster
from elastrain.launcher.store.job_keys import JobKeys, encode_view
from elastrain.launcher.store.port import Broken, Change, Item
from elastrain.launcher.store.standing_keys import StandingKeys
from elastrain.launcher.store.store_thread import Followed, RepeatedCalls
from elastrain.member.job_end import JobEnd
from elastrain.member.recovering import Recovering
from elastrain.member.shards.copies import CopiesGiven
from elastrain.member.shards.reduction import Reduction
from elastrain.member.state.ballot import Ballot
from elastrain.member.state.member_views import Views
from elastrain.runtime.engine.pacing import Departure
from tests.sim.findings import Search
from tests.sim.job import schedule as sc
from tests.sim.job.shrink import failure_of

WITHIN = 2500
Rule = Callable[..., Any]
Filter = Callable[[sc.Schedule], bool]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Shows in one of the first `WITHIN` schedules that `only` takes."""

    title: str
    rule: str
    part: Any
    """A class, or a module."""
    name: str
    planted: Rule
    only: Filter
    draw: Callable[[int], sc.Schedule] = sc.draw
    kind: str = "jobs"
    """The section of `tests.sim.findings`' table."""

    @property
    def search(self) -> Search:
        return Search(
            kind=self.kind,
            name=self.title,
            within=WITHIN,
            failure=self._failure,
            only=lambda seed: self.only(self.draw(seed)),
        )

    def _failure(self, seed: int) -> str:
        true_rule, planted = getattr(self.part, self.name), self.planted

        def replaced(part: Any, *args: Any, **kwargs: Any) -> Any:
            return planted(true_rule, part, *args, **kwargs)

        with patch.object(self.part, self.name, replaced):
            return failure_of(self.draw(seed))


PLANTS: dict[str, Plant] = {}


def _any(schedule: sc.Schedule) -> bool:
    return bool(schedule.faults)


def has(*kinds: type) -> Filter:
    return lambda schedule: any(isinstance(fault, kinds) for fault in schedule.faults)


_STORE = has(sc.StoreAway, sc.StoreTorn, sc.Compact, sc.Wipe, sc.Cut)
_NODES = has(sc.KillNode, sc.KillAll)
_SILENCE = has(sc.Cut, sc.Isolate, sc.Pause)


def planter(
    plants: dict[str, Plant], *, draw: Callable[[int], sc.Schedule] = sc.draw, kind: str = "jobs", only: Filter = _any
) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that puts rules among `plants`: `@plant(part, name)`, or with the schedules that may show it."""

    def plant(part: Any, name: str, only: Filter = only) -> Callable[[Rule], Rule]:
        def register(planted: Rule) -> Rule:
            title = "".join(word.capitalize() for word in planted.__name__.split("_"))
            rule = planted.__doc__ or ""
            plants[title] = Plant(
                title=title, rule=rule, part=part, name=name, planted=planted, only=only, draw=draw, kind=kind
            )
            return planted

        return register

    return plant


_plant = planter(PLANTS)


# ------------------------------------------------------------------------------------------ agents, and their store


@_plant(Cluster, "is_alive", _SILENCE)
def takes_silence_for_death(rule: Rule, cluster: Cluster, member: str) -> bool:
    """Silence is no proof: a silent member goes only where a majority that has every shard remains."""
    there = next((m.node for m in cluster.members if m.id == member), "")
    peer = cluster.peers.nodes.get(there)
    alive: bool = rule(cluster, member)
    return alive and not (peer is not None and peer.suspected)


@_plant(JobKeys, "put_view", _NODES)
def overwrites_the_view(rule: Rule, keys: JobKeys, view: View, seen: Any = None) -> View:
    """The store takes the first view of each generation: whoever comes second adopts it."""
    revision, _ = keys.newest_view()
    keys.commit({keys.view_key: revision}, {keys.view_key: encode_view(view)})
    return view


@_plant(JobKeys, "put_next_view", has(sc.Pause, sc.Isolate))
def puts_a_view_that_follows_upon_none(rule: Rule, keys: JobKeys, view: View, roster: Any, seen: Any) -> View:
    """A view follows upon the one that the store holds: where there is none, the job may be over."""
    keys.put_view_again(view)
    stands = keys.newest_view()[1]
    assert stands is not None
    return stands


@_plant(StandingKeys, "are_removed", has(sc.Isolate, sc.Pause))
def waits_for_a_job_that_is_over(
    rule: Rule, keys: StandingKeys, view: View | None, roster: Roster | None, items: Mapping[str, Item]
) -> bool:
    """Keys that are taken away end a node, also before its first view."""
    return view is None and keys.view is not None


@_plant(StandingKeys, "compare", has(sc.Wipe))
def puts_nothing_again(rule: Rule, keys: StandingKeys, news: Any, items: Mapping[str, Item]) -> None:
    """What stood is put again into a store that has lost it."""
    keys._remember(news)


@_plant(Shutdown, "_free_all")
def frees_nobody_at_the_end(rule: Rule, shutdown: Shutdown) -> list[Command]:
    """Once a member has passed the end, all others are told: nobody waits for anybody."""
    return []


@_plant(Failures, "on_death")
def sees_a_death_and_does_nothing(rule: Rule, part: Failures, event: WorkerDied, now: float) -> list[Command]:
    """A death changes the view."""
    commands: list[Command] = rule(part, event, now)
    return [command for command in commands if type(command).__name__ not in ("Propose", "TellNodes")]


@_plant(ViewChanges, "_ask_later", has(sc.StoreAway, sc.StoreTorn, sc.Cut))
def asks_the_store_once(rule: Rule, part: ViewChanges, now: float) -> list[Command]:
    """A store that did not answer is asked again."""
    commands: list[Command] = rule(part, now)
    part._deadlines.clear()
    return commands


@_plant(ViewChanges, "on_answer", has(sc.StoreAway, sc.StoreTorn, sc.Cut))
def believes_in_its_own_proposal(rule: Rule, part: ViewChanges, event: ProposalAnswered, now: float) -> list[Command]:
    """A view stands when the store says so, and not because it was proposed."""
    mine, view = part._cluster, part._cluster.view
    if event.view is None and view is not None and not part._shutdown.end:
        rest = tuple(m for m in view.members if mine.is_alive(m.id))
        if rest and rest != view.members:
            event = ProposalAnswered(view=View(generation=view.generation + 1, members=rest, begun=True))
    commands: list[Command] = rule(part, event, now)
    return commands


@_plant(RepeatedCalls, "until_answered", has(sc.StoreAway, sc.StoreTorn, sc.Cut))
def calls_the_store_once(
    rule: Rule, calls: RepeatedCalls, work: Callable[[], Any], then: Callable[[Any], None]
) -> None:
    """What must be in the store is put until the store answers."""
    calls._thread.call(lambda _: work(), lambda answer: None if isinstance(answer, Exception) else then(answer))


@_plant(Followed, "_take", _STORE)
def hears_of_no_broken_watch(rule: Rule, part: Followed, change: Change | Broken) -> None:
    """A watch that breaks is made anew, from a new listing."""
    if isinstance(change, Broken):
        part._closed.set()
    rule(part, change)


@_plant(JobKeys, "take_member", has(sc.Wipe, sc.Isolate, sc.Cut))
def counts_members_anew(rule: Rule, keys: JobKeys, *, at_least: int, roster: Any) -> int:
    """No member's number is used twice, whatever the store forgets."""
    return keys.take_number("members")


@_plant(Suspicions, "on_suspect", has(sc.Reset, sc.Cut))
def hears_no_suspicion(rule: Rule, part: Suspicions, by: Any, message: Any, now: float) -> list[Command]:
    """Of two members that live and do not reach each other, one is ended."""
    return []


@_plant(Rendezvous, "_first_nodes", _NODES)
def waits_for_the_whole_roster(rule: Rule, part: Rendezvous) -> list[NodeRecord]:
    """The first view needs the nodes of the roster that live."""
    known = {record.name for record in part._cluster.peers.known()}
    roster = part._cluster.roster
    lost = [record for record in roster.nodes if record.name not in known] if roster is not None else []
    first: list[NodeRecord] = [] if lost else rule(part)
    return first


@_plant(ViewChanges, "_speaks_for_the_dead", has(sc.KillAll, sc.KillNode))
def speaks_for_nobody(rule: Rule, part: ViewChanges, view: View) -> bool:
    """Where no member is left and none of their agents answers, another agent ends the job."""
    return False


# ------------------------------------------------------------------------------------------------------------ members


@_plant(JobEnd, "let_go")
def stays_after_the_end(rule: Rule, end: JobEnd) -> None:
    """Whoever is told that the job is over leaves."""
    if end.step is not None:
        rule(end)


@_plant(CopiesGiven, "forget_view")
def waits_for_copies_to_the_dead(rule: Rule, given: CopiesGiven) -> None:
    """A new view makes void what was on its way in the last one."""


@_plant(Departure, "may_go", has(sc.Preempt))
def hands_over_the_only_copy(rule: Rule, departure: Departure, elsewhere: Any) -> bool:
    """A member whose node is told to go stays until another node has all that it holds."""
    return departure._is_asked


@_plant(Views, "take_waiting")
def loses_what_came_too_early(rule: Rule, views: Views) -> list[p.Arrived]:
    """What comes too early is read later: its sender says it once."""
    rule(views)
    return []


@_plant(Recovering, "_publish_lacking")
def publishes_nothing_again(rule: Rule, recovering: Recovering, decision: Recovery) -> None:
    """Members that lack parameters of the committed step get them again."""
    if recovering._machine.commit.is_initial:
        rule(recovering, decision)


@_plant(Reduction, "resume")
def forgets_what_it_computed_meanwhile(rule: Rule, reduction: Reduction, folded: Mapping[tuple[int, int], Any]) -> None:
    """What the loop has computed during a recovery is taken in after it."""
    reduction._deferred = []
    rule(reduction, folded)


@_plant(Ballot, "clear")
def keeps_acknowledgements(rule: Rule, ballot: Ballot) -> None:
    """Acknowledgements belong to one view and one step."""
    acks = getattr(ballot, "_acks", {})
    rule(ballot)
    ballot._acks = acks


@_plant(Recovering, "switch")
def keeps_what_was_told_in_the_last_view(rule: Rule, recovering: Recovering) -> None:
    """Answers and requests of a view are void in the next."""
    machine = recovering._machine
    custody, parts = machine.custody, machine.parts
    keeping = (
        custody.holdings,
        custody.mismatches,
        custody.comparison,
        custody.primaries,
        custody.sole_copies,
        custody.taken,
        custody.digest_broadcast,
    )
    machine.parts = tuple(part for part in parts if part not in keeping)
    rule(recovering)
    machine.parts = parts


@_plant(Views, "switch")
def keeps_reports_of_the_last_view(rule: Rule, views: Views) -> None:
    """Each view decides by its own reports."""
    reports = dict(views.reports)
    rule(views)
    current = views.current
    assert current is not None
    views.reports = {m: replace(r) for m, r in reports.items() if m in current}
