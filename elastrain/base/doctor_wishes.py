"""Requests by which `elastrain doctor` asks a script, instead of training, for its memory or for its bits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MEMORY = "ELASTRAIN_STATE_MEMORY"


@dataclass(frozen=True, kw_only=True)
class EstimateWish:
    """A request of `elastrain doctor`: `prepare` writes each member's memory estimate to `file`, as JSON, and exits."""

    file: str
    nodes: int
    members_per_node: int
    backups: int | None = None
    """Backups per shard. None: the number that the script sets."""

    @property
    def members(self) -> dict[str, str]:
        """Member -> node, in rank order."""
        count, each = self.nodes * self.members_per_node, self.members_per_node
        return {f"m{rank}": f"node{rank // each}" for rank in range(count)}

    def environment(self) -> dict[str, str]:
        """Return the request as an environment variable for the script."""
        return {MEMORY: json.dumps(asdict(self))}

    def answer(self, text: str) -> None:
        """Write the answer to `file`. Raises OSError."""
        Path(self.file).write_text(text)


BITS = "ELASTRAINBITS"


@dataclass(frozen=True, kw_only=True)
class BitsWish:
    """A request of `elastrain doctor --bits`: the loop records some micro-batches to `file`, and the process exits."""

    file: str
    initial: str
    """File with the first parameters. The first process writes it, all later ones begin with it."""
    rank: int = 0
    is_reversed: bool = False
    """True to compute the micro-batches from the last to the first."""
    fill: int = 0
    """Number, 0 or 1, of the content of memory that `torch.empty` returns."""

    def environment(self) -> dict[str, str]:
        """Return the request as environment variables, with the rank that scripts look up."""
        place = {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        return {BITS: json.dumps(asdict(self)), "ELASTRAIN_MEMBER": f"m{self.rank}", **place}
