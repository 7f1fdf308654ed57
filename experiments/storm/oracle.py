"""Is the run of a case what the job of one was? Lines per committed step against lines; and what a case amounts to.

A script may write a last line after its loop, with fewer columns: how many steps there were, and the digest at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ("step", "digest", "loss", "gradient norm", "skipped", "learning rate")


@dataclass(kw_only=True)
class Outcome:
    """What one case came to; empty sentences say that all is well."""

    seed: int
    kills: int = 0
    stops: int = 0
    struck: list[str] = field(default_factory=list)
    """What was done, and after which commit."""
    commits: int = 0
    mismatch: str = ""
    hang: str = ""
    false_end: str = ""
    too_slow: str = ""
    """Given up although it still went on; no verdict."""
    no_room: str = ""
    """Ended with one sentence, because fewer members need more memory than their limit."""
    leftovers: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.mismatch or self.hang or self.false_end or self.leftovers)

    def sentences(self) -> list[str]:
        told = [
            f"{kind}: {text}"
            for kind, text in (
                ("MISMATCH", self.mismatch),
                ("HANG", self.hang),
                ("FALSE END", self.false_end),
                ("too slow", self.too_slow),
                ("no room", self.no_room),
            )
            if text
        ]
        return told + [f"LEFT BEHIND: {each}" for each in self.leftovers]


def read_steps(folder: Path) -> dict[str, list[str]]:
    """Member -> its whole lines, in order."""
    found = {}
    for path in sorted((folder / "steps").glob("*.txt")):
        text = path.read_text()
        found[path.stem] = text[: text.rfind("\n") + 1].splitlines()
    return found


def difference(members: Mapping[str, Sequence[str]], alone: Sequence[str]) -> str:
    """Empty if every line of every member is the undisturbed one's; else the first step that differs, and how."""
    wanted = {_step(line): line.split() for line in alone}
    found = [
        (_step(line), member, line.split())
        for member, lines in members.items()
        for line in lines
        if wanted.get(_step(line)) != line.split()
    ]
    if not found:
        return ""
    step, member, words = min(found)
    if step not in wanted:
        return f"{member} committed step {step}, which the job of one has not"
    which = next(i for i, (one, other) in enumerate(zip(words, wanted[step], strict=True)) if one != other)
    also = sorted({name for at, name, _ in found if at == step} - {member})
    return (
        f"step {step}: {COLUMNS[which]} of {member} is {words[which]}, alone {wanted[step][which]}"
        + (f" (likewise wrong: {', '.join(also)})" if also else "")
        + f"; {len({at for at, _, _ in found})} steps differ"
    )


def unfinished(members: Mapping[str, Sequence[str]], alone: Sequence[str]) -> str:
    """Empty if somebody has come to the last step."""
    if any(lines and _step(lines[-1]) == _step(alone[-1]) for lines in members.values()):
        return ""
    return f"no member has come to step {_step(alone[-1])}, the last one, and the job says that it is finished"


def _step(line: str) -> int:
    return int(line.split(maxsplit=1)[0])
