"""Values that one member gives to all others between two steps: `job.broadcast`.

A value travels as the figures of an evaluation of one batch: its text is the name of a figure. The text holds plain
data only, never code.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from elastrain.errors import ConfigError
from elastrain.job.figures import Figure, read, written
from elastrain.runtime.loop_state.loop_state_codec import Packer, unpack

BROADCASTS = "values of job.broadcast"
"""Name of the part of the loop state that tells which values were sent."""
VALUE_BYTES_MAX = 8 << 20
"""Most bytes of a value. Its text is a third longer, has to fit into a message, and is kept until the next commit."""


def to_text(thing: Any, what: str = "the value of job.broadcast(…)") -> str:
    """Return a value as text. Raises ConfigError, with the place, for what is no data, and for too much of it."""
    packer = Packer(with_code=False)
    try:
        tree = json.dumps(packer.pack(what, thing)).encode()
    except (RecursionError, ValueError) as error:  # a list that contains itself; a number of more than 4300 digits
        raise ConfigError(f"{what} cannot be written as text: {error}") from None
    if (size_bytes := len(tree) + packer.size_bytes) > VALUE_BYTES_MAX:
        raise ConfigError(
            f"{what} has {size_bytes} bytes, and at most {VALUE_BYTES_MAX} travel: write it to "
            "a file, and send the path"
        )
    raw = b"".join(each.numpy().tobytes() for each in packer.payload())
    return base64.b64encode(len(tree).to_bytes(4, "little") + tree + raw).decode()


def from_text(text: str, device: torch.device) -> Any:
    """Return a new copy of the value. Tensors that were on an accelerator come to `device`."""
    whole = bytearray(base64.b64decode(text))
    start = 4 + int.from_bytes(whole[:4], "little")
    raw = torch.frombuffer(whole[start:], dtype=torch.uint8) if len(whole) > start else None
    return unpack(json.loads(whole[4:start]), raw, device=device)


@dataclass(frozen=True)
class OneValue:
    """The value that this member gives if it is asked for it."""

    thing: Any
    from_rank: int | None
    first = 0
    call = "job.broadcast(…)"

    # By the number at the start, too: after losses a rank may be missing by no fault of the script.
    def check(self, members: int) -> None:
        """Raise ConfigError if the rank is none of a job that has, or had at its start, this number of members."""
        rank = self.from_rank
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < members:
            raise ConfigError(
                f"from_rank of job.broadcast(…) must be a whole number from 0 to {members - 1}, because this job has "
                f"{members} members; got {rank!r}"
            )

    @property
    def count(self) -> int:
        """Number of batches."""
        return 1

    @property
    def plan(self) -> str:
        """The call in words; equal on all members."""
        return f"job.broadcast(…, from_rank={self.from_rank})"

    def figures(self, batch: int) -> str:
        """Return the value as figures. Raises ConfigError for what is no data."""
        return written({to_text(self.thing): Figure(None, (batch,))})


class SentValues:
    """A digest of all values that were broadcast, which is a part of the loop state."""

    def __init__(self) -> None:
        self._digest = ""

    def take(self, figures: str, device: torch.device) -> Any:
        """Return a copy of the value of these figures, and count it."""
        (text,) = read(figures)
        self._digest = blake2b((self._digest + text).encode(), digest_size=8).hexdigest()
        return from_text(text, device)

    def state_dict(self) -> dict[str, str]:
        """Return the state as data."""
        return {"digest": self._digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Go on behind the values that the other members have got."""
        self._digest = state["digest"]
