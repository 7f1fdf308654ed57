"""Command `elastrain inject`: request a fault from a running, armed job, or list the possible faults."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.faults.table import CLASSES, NOT_ARMED, Carrier, as_data, as_text
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunOption
from elastrain.launcher.shared.operator_messages import Answer, AskFault
from elastrain.launcher.shared.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class FaultWords:
    """Options for the target, time and duration of a fault, as words that `grammar` checks."""

    target: Annotated[
        str | None,
        typer.Option("--target", help="member:ID, node:NAME, etcd; or member:random. Several at once with commas."),
    ] = None
    at: Annotated[
        str | None,
        typer.Option(
            "--at", help="step=N, phase=P or both; or t=SECONDS since the start of the job. Without it, at once."
        ),
    ] = None
    duration: Annotated[
        str | None, typer.Option("--for", metavar="SECONDS", help="How long, for faults that end again.")
    ] = None

    def words(self) -> list[str]:
        """Return the given options as command-line words."""
        flags = {"--target": self.target, "--at": self.at, "--for": self.duration}
        return [word for flag, value in flags.items() if value is not None for word in (flag, value)]


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    """Options for listing the fault classes instead of injecting a fault."""

    list_: Annotated[bool, typer.Option("--list", help="List the classes with their targets and options.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="With --list: for programs.")] = False

    def show(self) -> None:
        """Print the fault classes."""
        print(json.dumps(as_data()) if self.as_json else as_text())


@grouped
def inject(
    words: FaultWords,
    listing: ListFlags,
    kind: Annotated[str | None, typer.Argument(metavar="CLASS", help="What happens; see --list.")] = None,
    run: RunOption = None,
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[--OPTION VALUE]...", help="Options of the class; see --list.")
    ] = None,
) -> int:
    """Inject a fault into a run that was started with --inject or --faults.

    For example: elastrain inject slow --target member:m1 --at step=20 --for 10 --factor 4
    """
    if listing.list_:
        listing.show()
        return 0
    if kind is None:
        raise ConfigError("the class of the fault is missing: elastrain inject --list shows all of them")
    fault = grammar.from_words([kind, *words.words(), *(options or [])])
    answer = ask(rundir.find(run), fault)
    print(f"elastrain: {answer.sentence}", file=sys.stdout if answer.ok else sys.stderr)
    return 0 if answer.ok else 1


def ask(run: RunDir, fault: Fault, careful_of: tuple[str, ...] | None = None) -> Answer:
    """Request a fault from the agent or launcher that carries it out, and return the answer.

    careful_of: see `AskFault`.

    Raises ConfigError if the run has ended, accepts no faults, or has no process that can carry the fault out. Raises
    NoAnswerError if its agent does not answer.
    """
    request, row = AskFault(line=str(fault), careful_of=careful_of), CLASSES[fault.kind]
    # Faults at a step or phase go to an agent: a member reports the place to it, and it asks the launcher. Only agents
    # know which members hold the state.
    by_way_of_an_agent = fault.place.step is not None or fault.place.phase is not None
    by_way_of_an_agent |= careful_of is not None and row.loses
    asked = (
        operator_messages.ask_launcher
        if row.by is Carrier.LAUNCHER and not by_way_of_an_agent
        else operator_messages.ask
    )
    answer = asked(run, request)
    if answer.sentence == NOT_ARMED:  # wrong input, as in `elastrain chaos`
        raise ConfigError(NOT_ARMED)
    return answer
