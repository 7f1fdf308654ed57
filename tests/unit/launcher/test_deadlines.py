"""The table of deadlines in docs/deadlines.md names every one there is, with its default; and they nest as it says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elastrain.launcher.agent import node_end
from elastrain.launcher.nodes import agent_links
from elastrain.launcher.shared.times import JobTimes
from elastrain.launcher.simulated import embedded_etcd
from elastrain.launcher.start import run_options
from elastrain.launcher.store import registry
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.runtime.engine import pacing
from elastrain.runtime.io import agent_link
from tests.support.sources import ROOT

FOLDERS = ("launcher", "elastrain/runtime", "elastrain/integrations", "comm", "snapshot")
ROW = re.compile(r"^\| `([\w/]+\.py) (\w+)` \| ([\d.]+) \|", re.MULTILINE)


def number(node: ast.expr | None) -> float | None:
    """The value of a constant, or of a product of constants; None for anything else and for nothing (0)."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value) or None
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            one, other = number(left), number(right)
            return None if one is None or other is None else one * other
    return None


def deadlines(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Names that end in `_s` and have a default: constants, fields, parameters."""
    for node in ast.walk(tree):
        named: list[tuple[str, ast.expr | None]] = []
        match node:
            case ast.Module(body=body) | ast.ClassDef(body=body):
                for line in body:
                    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                        named.append((line.targets[0].id, line.value))
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        named.append((line.target.id, line.value))
            case ast.FunctionDef(args=args, name=name):
                last = args.args[len(args.args) - len(args.defaults) :]
                told = [*zip(last, args.defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
                named = [(f"{name}_{arg.arg}", default) for arg, default in told]
        for name, value in named:
            default = number(value)
            if name.lower().endswith("_s") and default is not None:
                yield name, default


def test_every_deadline_stands_in_the_table_with_its_default_and_nothing_else_does() -> None:
    there = {
        (str(path.relative_to(ROOT)), name): default
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, default in deadlines(ast.parse(path.read_text()))
    }
    table = (ROOT / "docs/deadlines.md").read_text()
    told = {(file, name): float(default) for file, name, default in ROW.findall(table)}
    assert told == there, "the table of deadlines in docs/deadlines.md is to be the same as the code"


def test_deadlines_nest_as_the_table_says() -> None:
    job = JobTimes()
    waits = run_options.Waits()
    assert agent_links.SILENCE_S >= 5 * agent_links.BEAT_S
    assert agent_links.SILENCE_S + job.silence_grace_s <= registry.LEASE_S  # a majority judges before the lease proves
    assert (
        EtcdConfig(endpoints=("h:1",)).limit_s > registry.LEASE_S
    )  # a store away for one call may have cost all leases
    assert job.meet_s < registry.LEASE_S
    assert job.absent_s >= 2 * registry.LEASE_S
    assert job.suspicion_s < job.leave_timeout_s < waits.stop_grace_s < node_end._GIVE_UP_S
    assert job.suspicion_s + job.leave_timeout_s < pacing.RECOVERY_DEADLINE_S
    assert waits.join_timeout_s > max(agent_link.CONNECT_TIMEOUT_S, embedded_etcd.START_S)
    assert waits.last_call_s < waits.join_timeout_s < waits.park_timeout_s < waits.key_ttl_s
    assert (waits.join_timeout_s, waits.last_call_s) == (job.join_timeout_s, job.last_call_s)
    assert waits.park_timeout_s == job.park_timeout_s
