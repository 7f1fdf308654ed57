"""Rules for shards that move with their blocks: where holders should be, and which shards go to a coming primary.

They own no data. `Roles` has the targets, and `pipeline/moves.py` the rules of moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastrain import protocol as p
from elastrain.job.placement import Placement, handed_over, target
from elastrain.member.parts import Machine
from elastrain.pipeline.moves import shadows
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote


class MovingShards:
    """Rules about the holders of shards under a plan, and under the coming one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def aim(self) -> None:
        """Set the target placement of the shards for the members of this view and the pipeline plan."""
        plan, roles, replicas = self._machine.commit.plan, self._machine.commit.roles, self._machine.replicas
        homes = replicas.homes(plan)
        coming: dict[int, str] = {}
        if plan is not None and plan.coming and homes is not None:
            goal = self._goal(roles.live, replicas.homes(plan.goal))
            # By the plan alone, so that all members find the same.
            known = enumerate(zip(goal, roles.live, homes, strict=True))
            # A shard whose new primary computes with it today moves by `target`, once the coming plan holds.
            coming = {shard: g.primary for shard, (g, now, at) in known if g.primary not in (now.primary, *at)}
        roles.aim(self._goal(roles.live, homes), coming)

    def _goal(self, now: Placement, homes: Sequence[tuple[str, ...]] | None) -> Placement:
        m = self._machine
        lanes = [shard.lanes for shard in m.shape.shards]
        return target(now, m.shape.sizes, m.views.view.nodes, m.shape.backups, homes, lanes)

    def vote(self) -> PlanVote | None:
        """Return this member's say about plans, with the holders of its shards if the coming plan holds next."""
        m = self._machine
        said, roles = m.step.proposals.vote(is_ready=m.shadow_feed.is_ready()), m.commit.roles
        # Only a primary knows who has acknowledged, so it names the holders of its own shards.
        going = [shard for shard in roles.mine if shard in roles.coming]
        if said is None or not going:
            return said
        hands: list[tuple[int, tuple[str, ...]]] = []
        for shard in going:
            taker, ready = roles.coming[shard], {m.me, *m.step.ballot.acknowledged(shard)}
            # A member that has acknowledged can make the update, so it needs no publish of the parameters.
            if taker in ready:
                backups = len(roles.target[shard].backups)
                hands.append((shard, handed_over(roles.live[shard], taker, ready, m.views.view.nodes, backups).all))
        # All shards go in one record, or the blocks wait: a replica without its shards would wait for their publish.
        return replace(said, hands=tuple(hands), lacks_taker=len(hands) < len(going))

    def tell_move(self, step: int, before: PipelinePlan | None) -> None:
        """Tell of the move that the record of `step` has ended, if one was under way in the plan `before`."""
        m = self._machine
        if before is not None and before.coming:
            told = tuple((member, tuple(sorted(blocks))) for member, blocks in shadows(before).items())
            is_dropped, sent_bytes = m.commit.plan != before.goal, m.shadow_feed.sent_bytes
            m.out.do(p.Moved(step=step, named=before.named, shadows=told, is_dropped=is_dropped, sent_bytes=sent_bytes))
