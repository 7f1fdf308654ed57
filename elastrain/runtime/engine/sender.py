"""Messages of the protocol core on their way out: encoded, with the tensors that they name, and struck by faults."""

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
    """Sends for the core, in the engine's thread. `payload_of` gives the tensors that a message names."""

    def __init__(
        self, mesh: Mesh, payload_of: Callable[[Message], list[Tensor]], faults: ArmedFaults, journal: Journal
    ) -> None:
        self._mesh = mesh
        self._payload_of = payload_of
        self._faults = faults
        self._journal = journal
        self._loop_payload: Callable[[], list[Tensor]] = list

    def use_loop_payload(self, payload: Callable[[], list[Tensor]]) -> None:
        """From now on the state of the training loop has these tensors."""
        self._loop_payload = payload

    def send(self, command: p.SendMessage) -> None:
        message = command.message
        kind, body = encode(message)
        payload = self._loop_payload() if isinstance(message, LoopHandover) else self._payload_of(message)
        if isinstance(message, ShardCopy | Copied):
            self._journal.write("copy", shard=message.shard, to=command.to)
        if isinstance(message, Partial):
            self._faults.tools.partial.strike(payload)
        try:
            self._mesh.send(command.to, kind, body, payload)
        except CommError as error:  # the view will say what became of the receiver
            self._journal.write("unsent", to=command.to, reason=str(error))
        match message:  # some members have got it, and others have not
            case Vote(step=step):
                self._faults.reach(step, "commit")
            case Publish(step=step):
                self._faults.reach(step, "publish")
