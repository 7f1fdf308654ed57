"""`elastrain inject`: ask a running, armed job for a fault."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from elastrain.launcher import control, rundir
from elastrain.launcher.faults import make_fault
from elastrain.launcher.operator_messages import Answer, AskFault


def inject(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="CLASS", help="kill: SIGKILL to the worker and all that it started; to a node's workers and agent."
        ),
    ],
    target: Annotated[str, typer.Option("--target", help="member:ID, member:random, or node:NAME.")],
    at: Annotated[
        str | None, typer.Option("--at", help="step=N, phase=P or both: where it happens; without it, at once.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="The run's folder or job id; default: the newest.")] = None,
) -> int:
    """Inject a fault into a run that was started with --inject or --faults."""
    make_fault(kind, target, at)
    answer: Answer = control.ask(rundir.find(run), AskFault(kind=kind, target=target, at=at))
    print(f"elastrain: {answer.sentence}", file=sys.stdout if answer.ok else sys.stderr)
    return 0 if answer.ok else 1
