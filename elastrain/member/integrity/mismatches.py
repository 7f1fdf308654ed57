"""Search for the wrong side if a backup's update differs from its primary's, and answers to peers' questions.

A difference is a doubt at first. The backup makes its update again, then asks all other members. If there is no third
copy, it has the primary repeat the update. arbitration.py decides from the answers, and repair.py repairs.
"""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.integrity.arbitration import (
    Difference,
    Side,
    Verdict,
    changed_since,
    judge,
    judge_trial,
    look_again,
    look_before_taking_over,
)
from elastrain.job.values import Recovery
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.comparison import Comparison
from elastrain.member.integrity.repair import Repair
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import HeldShard, Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.codec import BitMask
from elastrain.protocol.messages import DigestReply, Doubt, RepeatUpdate


class Mismatches(MemberPart):
    """Part that resolves doubts about states, and owns the questions. The doubts are with the states, in `Holdings`."""

    def __init__(
        self, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, repair: Repair, out: Commands
    ) -> None:
        self._views, self._commit, self._holdings = views, commit, holdings
        self._comparison, self._repair, self._out = comparison, repair, out
        self._answers: dict[int, dict[str, int | None]] = {}
        """Shard in doubt -> member -> its answer."""
        self._askers: dict[int, set[str]] = {}
        """Shard -> members that wait for the digest of the update that this member is about to make."""

    def forget_view(self) -> None:
        """Forget questions and answers: in the next view the members ask again."""
        # An answer to a question of the last view could be taken for one of this view.
        self._askers.clear()
        self._answers.clear()

    # ------------------------------------------------------------------------------------------------ this member's

    def open(self, shard: int, step: int) -> None:
        """Make this backup's update again, because it differs from the primary's."""
        assert self._commit.record is not None
        held = self._holdings[shard]
        held.doubt(shard, step, self._views.me)
        self._out.do(p.UpdateAgain(record=self._commit.record, shard=shard, touched=held.kept[step].touched))

    def on_updated_again(self, event: p.UpdatedAgain) -> bool:
        """Compare the repeated update. Returns True if the doubt is over and the update is valid."""
        held = self._holdings.find(event.shard)
        if held is None:
            return False
        if held.difference is None or held.difference.step != event.step:
            self._look_at_what_was_taken_over(held, event)
            return False
        held.update(event.step, event.digest)
        verdict = look_again(
            held.difference,
            verified=held.digest,
            verified_now=event.before,
            has_gradient=event.has_gradient,
            found_now=event.digest,
        )
        return self._conclude(held, verdict) if verdict is not None else self.ask(event.shard)

    def _look_at_what_was_taken_over(self, held: HeldShard, event: p.UpdatedAgain) -> None:
        """Check, as a new primary, that the update was made from the verified state. Gives the state up if not."""
        if not self._commit.roles.is_mine(event.shard) or held.version != event.step:
            return
        reason = look_before_taking_over(
            shard=event.shard,
            step=event.step,
            member=self._views.me,
            verified=held.expected_of(event.step - 1),
            verified_now=event.before,
            has_gradient=event.has_gradient,
        )
        if reason:
            self._repair.give_up(event.shard, reason)
        else:
            held.note_digest(event.digest)  # what works on the model's memory now is compared with this

    def ask(self, shard: int) -> bool:
        """Ask all other members about the shard, holders or not. Returns True if the doubt is over."""
        held = self._holdings[shard]
        assert held.difference is not None
        # Answers of a former view may come from lost members, or be about memory that has changed.
        self._answers[shard] = {}
        question = Doubt(step=held.difference.step, shard=shard, parameters=False)
        self._out.send_all(self._views.others, question)
        return self._judge(held, held.difference)

    def resume(self, recovery: Recovery) -> None:
        """Ask the members of the new view, since some of those asked before may be lost."""
        for shard in self._holdings.in_doubt():
            if not self._out.is_closed:
                self.ask(shard)

    def on_reply(self, source: str, message: DigestReply) -> None:
        """Note a member's answer about a doubt, and judge once all answers are here."""
        held = self._holdings.find(message.shard)
        if held is None or held.difference is None:
            return
        if message.is_trial:
            self._conclude(held, judge_trial(held.difference, message.digest))
        else:
            self._answers.setdefault(message.shard, {})[source] = message.digest
            self._judge(held, held.difference)

    def _judge(self, held: HeldShard, difference: Difference) -> bool:
        answers = self._answers[difference.shard]
        # All answers are needed: a third copy that answers late could change the verdict.
        if not answers.keys() >= set(self._views.others):
            return False
        verdict = judge(difference, answers)
        # The primary can make the update again, from the state that both had verified and the backup sends.
        if verdict.wrong is Side.UNKNOWN and answers.get(difference.primary) is not None:
            self._try(held, difference)
            return False
        return self._conclude(held, verdict)

    def _try(self, held: HeldShard, difference: Difference) -> None:
        touched = tuple(map(BitMask, held.kept[difference.step].touched))
        trial = RepeatUpdate(step=difference.step, shard=difference.shard, touched=touched)
        self._out.send(difference.primary, trial)

    def _conclude(self, held: HeldShard, verdict: Verdict) -> bool:
        difference = held.difference
        assert difference is not None
        match verdict.wrong:
            case Side.NONE:  # nothing is wrong now, but the log should say that it was
                held.settle()
                self._out.do(p.Noticed(reason=verdict.reason))
                return True
            case Side.MEMBER:
                self._repair.give_up(difference.shard, verdict.reason)
            case Side.PRIMARY:
                held.settle()
                self._repair.begin_anew(verdict.reason, {difference.shard: difference.primary})
            case Side.UNKNOWN:
                self._out.fail("DivergedError", f"{verdict.reason}: start the job again without one of the two")
        return False

    # ------------------------------------------------------------------------------------------------------ others'

    @handles(Doubt)
    def on_doubt(self, source: str, message: Doubt) -> None:
        """Answer with the digest of the state here, if this member has made it itself.

        If the update is still to be made, the answer follows later.
        """
        shard, held = message.shard, self._holdings.find(message.shard)
        if shard in self._repair.given_up:
            return
        if message.step != self._commit.step:
            self._answer(source, message, None)
        elif message.parameters:
            self._out.do(p.DigestAgain(step=message.step, shard=shard, parameters=True, asker=source))
        elif held is None or (held.is_copy and held.version == message.step):
            # A copy equals its primary's state, right or wrong, so it is no witness.
            self._answer(source, message, None)
        elif held.version == message.step:
            self._out.do(p.DigestAgain(step=message.step, shard=shard, parameters=False, asker=source))
        elif held.update_of(message.step) is None and message.step in held.kept:
            # This member's own update is still to be made: then it is a witness.
            self._askers.setdefault(shard, set()).add(source)
        else:
            self._answer(source, message, held.update_of(message.step))

    def _answer(self, to: str, asked: Doubt, digest: int | None) -> None:
        told = {"step": asked.step, "shard": asked.shard}
        self._out.send(to, DigestReply(**told, parameters=asked.parameters, digest=digest, is_trial=False))

    @handles(p.DigestedAgain)
    def on_digested_again(self, event: p.DigestedAgain) -> None:
        """Send a repeated digest to the member that asked, and compare it with the announced one."""
        if event.asker == self._views.me and event.parameters:
            self._comparison.on_replaced(event.shard, event.digest)
            return
        if event.asker == self._views.me:
            self._comparison.looked_at_own(event.shard)
        elif event.asker in self._views.others:
            asked = Doubt(step=event.step, shard=event.shard, parameters=event.parameters)
            self._answer(event.asker, asked, event.digest)
        self._look_at_oneself(event)

    def _look_at_oneself(self, event: p.DigestedAgain) -> None:
        """Give this member's state up if its digest is no longer the announced one."""
        held = self._holdings.find(event.shard)
        if held is None:
            return
        told = held.published if event.parameters else held.digest
        if told is not None and told != event.digest:
            reason = changed_since(shard=event.shard, step=event.step, member=self._views.me)
            self._repair.give_up(event.shard, reason)
        elif told is None and event.asker == self._views.me and held.version == event.step:
            held.note_digest(event.digest)

    @handles(RepeatUpdate)
    def on_repeat_update(self, source: str, message: RepeatUpdate, payload: object) -> None:
        """Make the update again from the state and gradient that a backup has sent."""
        # This member computes it, but from memory that came from the backup: its own may have changed.
        if message.shard not in self._repair.given_up and message.step == self._commit.step:
            assert self._commit.record is not None
            self._out.do(
                p.TryUpdate(
                    record=self._commit.record,
                    shard=message.shard,
                    touched=message.touched,
                    payload=payload,
                    asker=source,
                )
            )

    @handles(p.UpdateTried)
    def on_tried(self, event: p.UpdateTried) -> None:
        """Send the digest of the repeated update to the backup, or None if its data was not the verified state."""
        held = self._holdings.find(event.shard)
        # The state is the one that both had: this member announced its digest, and the backup compared it.
        is_known = held is not None and held.expected_of(event.step - 1) == event.before and event.has_gradient
        made = event.digest if is_known else None
        if event.asker in self._views.others:
            answer = DigestReply(step=event.step, shard=event.shard, parameters=False, digest=made, is_trial=True)
            self._out.send(event.asker, answer)

    def answer_askers(self, shard: int, step: int) -> None:
        """Send the digest of this member's own update to the members that wait for it."""
        for member in sorted(self._askers.pop(shard, set()) & set(self._views.others)):
            asked = Doubt(step=step, shard=shard, parameters=False)
            self._answer(member, asked, self._holdings[shard].update_of(step))
