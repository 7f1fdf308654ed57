"""How `elastrain doctor` asks a script what a job of it will hold in memory: carried in the environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "ELASTRAIN_STATE_MEMORY"


@dataclass(frozen=True, kw_only=True)
class StatementWish:
    """`prepare` writes what each member will hold into `file`, as JSON, and ends the process."""

    file: str
    nodes: int
    members_per_node: int
    backups: int | None = None
    """None: as many as the script says."""

    @property
    def members(self) -> dict[str, str]:
        """Member -> node, in rank order."""
        count, each = self.nodes * self.members_per_node, self.members_per_node
        return {f"m{rank}": f"node{rank // each}" for rank in range(count)}

    def environment(self) -> dict[str, str]:
        return {NAME: json.dumps(asdict(self))}

    def answer(self, text: str) -> None:
        """Raises OSError."""
        Path(self.file).write_text(text)
