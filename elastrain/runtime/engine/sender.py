"""The sender of the protocol core's messages: encodes them, adds their tensors, and applies faults on request."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from elastrain import protocol as p
from elastrain.comm.errors import CommError
from elastrain.comm.wire.mesh import Mesh
from elastrain.job.values import Vote
from elastrain.protocol.messages import Copied, Gradient, LoopHandover, Message, Partial, Publish, ShardCopy, encode
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io.journal import Journal
from elastrain.runtime.tensors.executor import Executor


class Sender:
    """The sender of an engine, used by its thread. `executor` has the tensors that messages name."""

    def __init__(self, mesh: Mesh, executor: Executor, faults: ArmedFaults, journal: Journal) -> None:
        self._mesh = mesh
        self._executor = executor
        self._faults = faults
        self._journal = journal
        self._loop_payload: Callable[[], list[Tensor]] = list
        self._carried: dict[tuple[int, bool, Partial | Gradient | Publish], list[Tensor]] = {}
        """(generation, whether peers read them on the device, message) -> tensors of this step's messages that go to
        several members, or again."""

    def use_loop_payload(self, payload: Callable[[], list[Tensor]]) -> None:
        """Use these tensors for messages with the state of the training loop."""
        self._loop_payload = payload

    def send(self, command: p.SendMessage) -> None:
        """Send a message with its tensors. A receiver that cannot be reached is noted in the journal only."""
        message = command.message
        kind, body = encode(message)
        payload = self._payload_of(message, command.to)
        if isinstance(message, Copied) or (isinstance(message, ShardCopy) and message.part[0] == 0):
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

    def _payload_of(self, message: Message, to: str) -> list[Tensor]:
        """Return the message's tensors in memory that the receiver reads.

        A device's are copied once per view, step and kind of memory.
        """
        memory = self._executor.memory
        if isinstance(message, LoopHandover):  # its reader, the loop's thread, does not wait for the device
            return memory.carried(self._loop_payload())
        if memory.port.is_host:
            return self._executor.books.payload(message)
        in_place = self._mesh.links.reads_device(to)
        if not isinstance(message, Partial | Gradient | Publish):
            return memory.carried(self._executor.books.payload(message), in_place=in_place)
        key = (self._mesh.generation, in_place, message)  # a step that begins anew has another generation
        if key not in self._carried:
            # Memory that a peer still reads is not used again, although nothing refers to it here.
            self._carried = {at: made for at, made in self._carried.items() if at[2].step >= message.step}
            self._carried[key] = memory.carried(self._executor.books.payload(message), in_place=in_place)
        return self._carried[key]
