"""The house's limits: where each figure has to arrive, how far off it may be today, what to do about a difference.

`tests/unit/house.toml` lists by name what is over its limit today. It is a ratchet: no name may come in, no figure may
grow, and a name that has improved is struck or lowered. `python -m tests.support.table` prints all figures; with
`--lower` it strikes and lowers.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.house import House, Sizes, measure
from tests.support.sources import ROOT

TABLE = ROOT / "tests/unit/house.toml"
LOWER = "python -m tests.support.table --lower"


@dataclass(frozen=True)
class Limit:
    """Where one figure has to arrive, for every file, function or class, and what to do with one that is over it."""

    at_most: int
    advice: str


LIMITS = {
    "file_lines": Limit(350, "split it by what it is responsible for"),
    "function_lines": Limit(40, "let parts of it have names of their own"),
    "parameters": Limit(6, "group what belongs together in a frozen value"),
    "object_fields": Limit(12, "find the parts that own some of them"),
    "object_methods": Limit(25, "find the parts that some of them are about"),
    "object_lines": Limit(300, "find the parts in it"),
    "inherited_state": Limit(0, "hold an object instead of inheriting its fields"),
    "double_names": Limit(0, "name one of the classes for what it is"),
    "unread_wire_fields": Limit(0, "do not send what nobody reads"),
    "unused_dependencies": Limit(0, "strike it in pyproject.toml and constraints.txt"),
    "folder_files": Limit(16, "make folders by subject"),
    "double_files": Limit(0, "name one of the files for what it is"),
}


@dataclass(frozen=True)
class Allowed:
    """A name that may be over a limit for good, up to a size of its own, and why."""

    at_most: int
    why: str


ALLOWED = {
    "parameters": {
        "job.init": Allowed(11, "scripts say each setting by its keyword; a value would be one more class to import"),
        "hooks.save_on_disk": Allowed(9, "likewise, beside torch's save_on_cpu, which takes plain keywords"),
        "loader.DataLoader.__init__": Allowed(18, "it mirrors torch's DataLoader, which has 17"),
        "accelerate.Accelerator.__init__": Allowed(9, "it mirrors accelerate's Accelerator, which has 21"),
    },
    "object_methods": {
        "accelerate.Accelerator": Allowed(39, "it mirrors accelerate's Accelerator, which has some 100 methods"),
    },
    "object_lines": {
        "accelerate.Accelerator": Allowed(358, "it mirrors accelerate's Accelerator, whose methods scripts call"),
    },
    "object_fields": {
        "transformers.Trainer": Allowed(14, "half of them are fields of the library's Trainer, which it sets anew"),
    },
    "double_names": {
        "Accelerator": Allowed(
            2, "scripts import accelerate's name; the other one is a port to devices, and not public"
        ),
    },
}
"""The public face: what a user is best served by counts more here than a limit for ourselves."""
TOTALS = {"function_median": 6, "function_p90": 16, "product_files": 572, "product_code": 63_513}
"""Figures of the whole product, and where they have to arrive. Of its code, 1,900 lines are training on devices,
900 the planner, 1,060 adapters for other training libraries, and 1,850 what people's scripts need: loggers, streams,
figures, saved states, ranks."""
COMMENTS_PERCENT = 6.0
"""Of the lines of the pure parts, at least."""
SLACK = {"product_code": 63_513, "comments_percent": 0.2}

Table = Mapping[str, Mapping[str, float]]


def by_figure(house: House) -> dict[str, Sizes]:
    """Every figure that has a limit for each name."""
    return {
        "file_lines": house.files,
        "function_lines": house.functions,
        "parameters": house.parameters,
        "object_fields": house.object_fields,
        "object_methods": house.object_methods,
        "object_lines": house.object_lines,
        "inherited_state": house.inherited_state,
        "double_names": house.double_names,
        "unread_wire_fields": house.unread_wire_fields,
        "unused_dependencies": house.unused_dependencies,
        "folder_files": house.folder_files,
        "double_files": house.double_files,
    }


def read() -> Table:
    return tomllib.loads(TABLE.read_text())


def worse(figure: str, measured: Sizes, listed: Mapping[str, float]) -> list[str]:
    """A sentence for each name that is over the limit and not listed, or over what is listed.

    Who is listed may have some lines more: a longer name somewhere in it breaks a line.
    """
    slack = 1.05 if figure.endswith("_lines") else 1.0
    return [
        f"{name}: {figure} {size}, at most {listed.get(name, limit_of(figure, name))}: {LIMITS[figure].advice} "
        f"(if it was only renamed, rename its line in {TABLE.name})"
        for name, size in sorted(measured.items())
        if size > limit_of(figure, name) and size > slack * listed.get(name, 0)
    ]


def limit_of(figure: str, name: str) -> int:
    """At most so much for this name: what everybody keeps to, or what is `ALLOWED`."""
    allowed = ALLOWED.get(figure, {}).get(name)
    return LIMITS[figure].at_most if allowed is None else allowed.at_most


def needless(measured: Mapping[str, Sizes]) -> list[str]:
    """A sentence for each exception that allows more than is needed, or is for somebody who is gone."""
    return [
        f"{name}: {figure} {measured[figure].get(name, 0)}, {allowed.at_most} are allowed: lower or strike it"
        for figure, names in ALLOWED.items()
        for name, allowed in names.items()
        if measured[figure].get(name, 0) != allowed.at_most or allowed.at_most <= LIMITS[figure].at_most
    ]


def outdated(figure: str, measured: Sizes, listed: Mapping[str, float]) -> list[str]:
    """A sentence for each line of the table that allows more than is needed. A tenth is let pass: many land at once."""
    return [
        f"{name}: {figure} {measured.get(name, 0)}, the table allows {allowed}: run `{LOWER}`"
        for name, allowed in sorted(listed.items())
        if measured.get(name, 0) <= limit_of(figure, name) or measured[name] < 0.9 * allowed
    ]


def worse_totals(house: House, listed: Mapping[str, float]) -> list[str]:
    """A sentence for each total that is worse than the table allows. Getting better is free."""
    found = [
        f"{figure} {getattr(house, figure)}, at most {listed[figure]} (to arrive at {target})"
        for figure, target in TOTALS.items()
        if getattr(house, figure) > listed[figure]
    ]
    percent = house.comments_percent["pure"]
    if percent < listed["comments_percent"]:
        found.append(f"{percent} % of the pure parts' lines are comments, {listed['comments_percent']} % were: say why")
    return found


def worse_code(house: House, budgets: Mapping[str, float]) -> list[str]:
    """Return a sentence for each capability with more lines of code than its budget, or without one."""
    return [
        f"{name}: {lines} lines of code, at most {budgets.get(name, 0):g}: delete what is not needed, or state the new "
        f"budget of what was added in {TABLE.name}, section code_lines"
        for name, lines in house.code_lines.items()
        if lines > budgets.get(name, 0)
    ]


def lowered(house: House, table: Table) -> dict[str, dict[str, float]]:
    """The table with everything struck or lowered that has improved. What has become worse stays as it is listed."""
    sizes = by_figure(house)
    lower: dict[str, dict[str, float]] = {"totals": _lowered_totals(house, table["totals"])}
    for figure in LIMITS:
        over = {name: size for name, size in sizes[figure].items() if size > limit_of(figure, name)}
        lower[figure] = _lowered_names(over, table.get(figure, {}))
    budgets = table.get("code_lines", {})
    lower["code_lines"] = {name: min(lines, budgets.get(name, lines)) for name, lines in house.code_lines.items()}
    return lower


def _lowered_names(over: Sizes, listed: Mapping[str, float]) -> dict[str, float]:
    """Who is listed and still over, no higher than before. A name that is gone leaves its place to one no larger."""
    kept = {name: min(size, listed[name]) for name, size in over.items() if name in listed}
    gone = sorted(size for name, size in listed.items() if name not in over)
    for name, size in sorted(over.items(), key=lambda item: -item[1]):
        if name not in listed and gone and size <= gone[-1]:
            gone.pop()
            kept[name] = size
    return dict(sorted(kept.items()))


def _lowered_totals(house: House, listed: Mapping[str, float]) -> dict[str, float]:
    """Not below the target, and with some slack: what others land next may need a few lines first."""
    wanted = {name: getattr(house, name) + SLACK.get(name, 0) for name in TOTALS}
    totals = {name: min(listed[name], max(TOTALS[name], wanted[name])) for name in TOTALS}
    percent = min(COMMENTS_PERCENT, round(house.comments_percent["pure"] - SLACK["comments_percent"], 1))
    return {**totals, "comments_percent": max(listed["comments_percent"], percent)}


def as_toml(table: Table) -> str:
    """One line per name, so that two who strike different names seldom meet."""
    head = "# Who is over the house's limits today. Lines are struck or lowered, never added or raised:\n"
    parts = [f"{head}#   {LOWER}\n"]
    for figure, names in table.items():
        limit = f"  # at most {LIMITS[figure].at_most}" if figure in LIMITS else ""
        parts += [f"\n[{figure}]{limit}\n", *(f'"{name}" = {size}\n' for name, size in names.items())]
    return "".join(parts)


def report(house: House) -> str:
    """All figures as they are now, the worst names of each."""
    lines = [f"{figure:<20}{getattr(house, figure):>7}   to arrive at {target}" for figure, target in TOTALS.items()]
    percents = ", ".join(f"{room} {percent}" for room, percent in house.comments_percent.items())
    lines.append(
        f"{'comments %':<20}{house.comments_percent['pure']:>7}   to arrive at {COMMENTS_PERCENT} ({percents})"
    )
    lines += [f"{size:>27}   lines of code: {name}" for name, size in house.code_lines.items()]
    for figure, sizes in by_figure(house).items():
        over = sorted(((size, name) for name, size in sizes.items() if size > limit_of(figure, name)), reverse=True)
        largest = max((size for name, size in sizes.items() if name not in ALLOWED.get(figure, {})), default=0)
        lines.append(f"{figure:<20}{largest:>7}   at most {LIMITS[figure].at_most}; {len(over)} over it")
        lines += [f"{size:>27}   {name}" for size, name in over]
        lines += [f"{each.at_most:>27}   {name}, allowed: {each.why}" for name, each in ALLOWED.get(figure, {}).items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    house = measure()
    sys.stdout.write(report(house) + "\n")
    if "--lower" in arguments:
        TABLE.write_text(as_toml(lowered(house, read())))


if __name__ == "__main__":
    main(sys.argv[1:])
