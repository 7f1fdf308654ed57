"""The sender of the protocol core's messages: encodes them, adds their tensors, and applies faults on request."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from elastrain import protocol as p
from elastrain.comm.errors import CommError
from elastrain.comm.wire.mesh import Mesh
from elastrain.job.values import Vote
from elastrain.protocol.messages import Copied, LoopHandover, Message, Partial, Publish, ShardCopy, encode
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io.journal import Journal


class Sender:
    """The sender of an engine, used by its thread. `payload_of` returns the tensors that a message names."""

    def __init__(
        self, mesh: Mesh, payload_of: Callable[[Message], list[Tensor]], faults: ArmedFaults, journal: Journal
    ) -> None:
        self._mesh = mesh
        self._payload_of = payload_of
        self._faults = faults
        self._journal = journal
        self._loop_payload: Callable[[], list[Tensor]] = list

    def use_loop_payload(self, payload: Callable[[], list[Tensor]]) -> None:
        """Use these tensors for messages with the state of the training loop."""
        self._loop_payload = payload

    def send(self, command: p.SendMessage) -> None:
        """Send a message with its tensors. A receiver that cannot be reached is noted in the journal only."""
        message = command.message
        kind, body = encode(message)
        payload = self._loop_payload() if isinstance(message, LoopHandover) else self._payload_of(message)
        if isinstance(message, ShardCopy | Copied):
            self._journal.write("copy", shard=message.shard, to=command.to)
        if isinstance(message, Partial):
            self._faults.tools.partial.strike(payload)
        try:
            self._mesh.send(command.to, kind, body, payload)
        except CommError as error:  # the next view shows if the receiver was lost
            self._journal.write("unsent", to=command.to, reason=str(error))
        match message:  # a fault here strikes after some members got the message and before the others did
            case Vote(step=step):
                self._faults.reach(step, "commit")
            case Publish(step=step):
                self._faults.reach(step, "publish")
