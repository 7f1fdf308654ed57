"""DDP training steps that survive the loss of members, without wrapping the model again.

    for attempt in surviving(ddp, optimizer):
        with attempt:
            optimizer.zero_grad()
            loss_fn(ddp(batch)).backward()

The loop ends when the optimizer has been stepped, once, on every survivor; a loss of members in between makes the
survivors agree on who is left, and the attempt is made again (with fewer samples: the batch of the dead is not redone).

How they agree. After an attempt without failure all members meet in a barrier: each that comes through it knows that
all gradients are complete, and steps. When anything fails, the survivors edit the view and tell each other how many
steps they have made and whether their gradients are complete. If a rank has stepped, or all are complete, the others
step too: their gradients are the same. If not, the attempt is made again. A failure meanwhile only repeats the
exchange.

Which members go on. A member that cannot be reached may be alive, and think the same of us. So a set goes on that is
more than half of the last agreed view, not counting members that are proven to have ended: on one host every death is
proven (`liveness`), and one survivor is enough; between hosts a killed process looks like a cut cable, and half is not
enough: all end with Aborted. A launcher that knows better (a lease that ran out) calls `reconfigure` itself.

FSDP2 does not survive a loss yet: each shard of its parameters exists on one member only.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections.abc import Collection, Iterator
from types import TracebackType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from elastrain.comm.errors import Aborted, CommError
from elastrain.comm.torch_backend import bootstrap, view_change
from elastrain.comm.torch_backend.bootstrap import Session
from elastrain.comm.wire.addresses import LossCause
from elastrain.device import device_of

_EXCHANGE_S = 2.0  # after that a rank may have failed differently, so propose again


class StepDecision(enum.Enum):
    """Decision after a failure: make the optimizer step, or repeat the attempt."""

    STEP = "step"
    AGAIN = "again"


def judge(steps: int, told: list[tuple[int, bool]]) -> tuple[StepDecision, str]:
    """Decide what to do after a failure: `told` has each survivor's steps, and whether its gradients are complete.

    `steps`: those made here. Same answer for all members with equally many steps.
    """
    newest = max(made for made, _ in told)
    if newest > steps:
        return StepDecision.STEP, f"a rank has made step {newest}, so all gradients were complete"
    if all(complete for made, complete in told if made == newest) and min(made for made, _ in told) == newest:
        return StepDecision.STEP, "all gradients are complete"
    return StepDecision.AGAIN, "some gradients are not complete, and no rank has stepped"


def may_go_on(agreed: Collection[str], survivors: Collection[str], proven: Collection[str]) -> tuple[bool, str]:
    """Return True if `survivors` of the view `agreed` may go on without the others, and the reason.

    They must be more than half of the members not `proven` to have ended, so at most one of two disjoint sets gets
    True.
    """
    alive = [member for member in agreed if member not in proven]
    here = [member for member in survivors if member in alive]
    gone = ", ".join(member for member in alive if member not in survivors) or "no member"
    words = f"{len(here)} of {len(alive)} that may be alive are here; not proven to have ended: {gone}"
    return 2 * len(here) > len(alive), words


class StepAttempt:
    """One try at forward and backward. Swallows the exceptions that a loss brings about, and no others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.complete = False

    def __enter__(self) -> StepAttempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> bool:
        # DDP turns our errors into RuntimeError; what counts is whether the communicator has failed.
        self.complete = kind is None
        return kind is not None and issubclass(kind, Exception) and self._session.communicator.error is not None


def surviving(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Iterator[StepAttempt]:
    """Yield attempts at one training step until the optimizer has stepped; see the module.

    Raises Aborted if the others went on without this member, or may have. Raises the last error if no agreement is
    reached within the group's timeout, and TypeError for a model that is not wrapped in DDP.
    """
    _check_survives(model)
    session = bootstrap.session()
    bootstrap.tell_launcher()
    while True:
        attempt = StepAttempt(session)
        yield attempt
        verdict = _settle(session, complete=attempt.complete)
        if verdict is StepDecision.STEP:
            optimizer.step()
            session.steps += 1
            return
        # Sums of the failed attempt may still be on their way to gradients on a device.
        for device in {parameter.device for parameter in model.parameters()}:
            with device_of(device).side_stream("in"):
                device_of(device).synchronize()
        # A backward pass that was cut short leaves marks in the reducer.
        model._update_process_group(model.process_group)  # type: ignore[no-untyped-call] # torch's own


def _check_survives(model: torch.nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TypeError(
            "a model of fully_shard (FSDP2) does not survive a loss yet: each shard of its parameters exists on one"
            " member only. Train it with elastrain.init(), or go back to a checkpoint after a loss"
        )
    raise TypeError(f"expected a DistributedDataParallel model; got {type(model).__name__}")


def _settle(session: Session, *, complete: bool) -> StepDecision:
    if complete:
        try:
            session.communicator.world.barrier().wait()
            return StepDecision.STEP
        except CommError:
            pass  # the view has to change: below
    return _recover(session, complete=complete)


def _recover(session: Session, *, complete: bool) -> StepDecision:
    deadline_s = time.monotonic() + session.timeout_s
    while True:
        _check_wanted(session)
        try:
            told = _exchange(session, complete=complete)
        except CommError:
            if time.monotonic() > deadline_s:
                raise
            continue
        verdict, reason = judge(session.steps, told)
        if verdict is StepDecision.STEP and not complete:
            raise CommError(f"this member has no gradients of step {session.steps + 1}, but {reason}: replicas differ")
        return verdict


def _exchange(session: Session, *, complete: bool) -> list[tuple[int, bool]]:
    """Propose the view of all members that are not known to be lost, and hear how far each has come."""
    communicator = session.communicator
    survivors = [rank for rank, peer in enumerate(session.peers) if peer.id not in communicator.lost]
    view_change.edit(survivors)
    names = ",".join(communicator.world.members).encode()
    view_number = int.from_bytes(hashlib.blake2b(names, digest_size=7).digest(), "little")
    mine = torch.tensor([view_number, session.steps, int(complete)])
    outs = [torch.empty_like(mine) for _ in survivors]
    communicator.world.all_gather(outs, mine, timeout_s=_EXCHANGE_S).wait()
    if any(int(out[0]) != view_number for out in outs):
        communicator.abort("survivors disagree about who is left")
        raise Aborted("survivors disagree about who is left")
    session.agreed = communicator.world.members
    session.proven.clear()
    return [(int(out[1]), bool(out[2])) for out in outs]


def _check_wanted(session: Session) -> None:
    """Raise Aborted if this member must not go on."""
    lost = session.communicator.lost
    if LossCause.LEFT_US_OUT in lost.values():
        raise Aborted("the others went on without this member: end this process, and join as a new one")
    bootstrap.remember_proofs(session)
    survivors = [peer.id for peer in session.peers if peer.id not in lost]
    allowed, reason = may_go_on(session.agreed, survivors, session.proven)
    if not allowed:
        raise Aborted(f"{reason}: they may go on without us, so this member must not")
