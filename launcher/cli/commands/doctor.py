"""Command `elastrain doctor`: checks before a start, what members will hold in memory, or what makes bits differ."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from elastrain.base.doctor_wishes import EstimateWish
from elastrain.base.held_folder import held_folder
from elastrain.base.processes import die_with_parent
from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.agent.worker_start import HOST_MEMORY_LIMIT, HOST_TIER, MEMORY_LIMIT, OFFLOAD_DIRS, Script
from elastrain.launcher.cli.commands.bits import bits
from elastrain.launcher.cli.commands.preflight import PreflightFlags, preflight
from elastrain.launcher.cli.options.checkpoint_options import CheckpointFlags
from elastrain.launcher.cli.options.etcd_options import EtcdFlags
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.job_options import MemoryFlags
from elastrain.launcher.cli.options.node_options import stages_in
from elastrain.launcher.shared.console import print_table, say
from elastrain.launcher.shared.process_environment import inherited, without
from elastrain.launcher.shared.rundir import is_file

HOST = "host memory"
_PARTS = {
    "tier": "host memory for what leaves the device (--host-tier)",
    "base": "interpreter, libraries and data; and what the allocator keeps of the script's own parameters",
    "computing": "what torch's kernels and allocator keep, which is not known before, and one parameter's new gradient",
    "model": "parameters and running statistics; with stages of its blocks from the first commit on",
    "gradients": "copies of the gradient, sums on their way, what is kept for backups, scratch of updates; in a job on "
    "a device, those kept for backups and copies of what members send lie in host memory",
    "check": "one more copy, for a neighbour's micro-batch, beyond the states that do not exist yet at its time",
    "activations": "saved for backward by all micro-batches in flight",
    "boundaries": "what crosses the cuts in a step",
    "shards": "optimizer state of the shards that the member is primary of, now or once holders have moved",
    "backups": "parameters and state of others' shards",
    "unverified": "of backups, the next parameters and state until they are verified",
    "copies": "shards on their way to new holders",
    "staging": "states of a durable checkpoint that wait for the disk, at most; 0 under a limit that has no room",
    "spill": "what of all this leaves under the memory limit, to host memory (--host-tier) or to disk: taken off the "
    "total",
    "total": "at the moment at which the member holds most",
}
"""Names of the parts of a member's memory, and their meanings for the printed legend."""


@dataclass(frozen=True, kw_only=True)
class QuestionFlags:
    """Options for what to report, and for which size of job."""

    memory: Annotated[bool, typer.Option("--memory", help="State the bytes that each member will hold.")] = False
    bits: Annotated[bool, typer.Option("--bits", help="Name the first module whose bits differ on two members.")] = (
        False
    )

    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", "--nproc_per_node", min=1, help="Workers on each node.")
    ] = 1
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Nodes.")] = 1
    backups: Annotated[
        int | None, typer.Option("--backups", min=0, help="Copies of each shard; default: what the script says.")
    ] = None
    stages: Annotated[
        str | None,
        typer.Option("--stages", help="Members of a pipeline: a number, or auto; default: what the script says."),
    ] = None

    def check(self) -> None:
        """Raise ConfigError if there are more stages than members."""
        members, stages = self.nnodes * self.nproc_per_node, stages_in(self.stages)
        if isinstance(stages, int) and stages > members:
            raise ConfigError(
                f"--stages {stages} asks for pipelines of {stages} members, and this job has {members}: ask "
                "for more workers (--nproc-per-node), or for fewer stages"
            )

    def wish(self, file: Path) -> EstimateWish:
        """Return the request for the script's process. `file` is where that process writes its answer."""
        return EstimateWish(
            file=str(file), nodes=self.nnodes, members_per_node=self.nproc_per_node, backups=self.backups
        )


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """Options that a job would have."""

    limits: MemoryFlags
    checkpoints: CheckpointFlags
    before: PreflightFlags
    etcd: EtcdFlags

    def drives(self) -> list[tuple[str, Path]]:
        """Return the folders that a job would use, with their options. Checkpoints behind a URL are left out."""
        found = [("--offload-dir", each) for each in self.limits.offload_dir or ()]
        if self.checkpoints.checkpoint_dir is not None and "://" not in self.checkpoints.checkpoint_dir:
            found.append(("--checkpoint-dir", Path(self.checkpoints.checkpoint_dir)))
        return found


@grouped
def doctor(
    question: QuestionFlags,
    job: JobFlags,
    script: Annotated[str | None, typer.Argument(help="The training script, for --memory and --bits.")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.", metavar="[-- ARGS...]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Check this machine before a job starts: limits, drives, versions, etcd, and the links to other machines.

    The exit code is 1 if something would stop a job.

    With --memory, run SCRIPT up to `job.prepare`, alone, and say what each member of a job of it will hold. With
    stages, it runs up to its first micro-batch, with blocks that compute nothing. For a model on a device, it says
    what is held in the device's memory, and then what is held in host memory. The exit code is 1 if a member will hold
    more than --memory-limit or --host-memory-limit.

    With --bits, two members run it up to its first micro-batches, which they compute in another order, one after the
    other. The exit code is 1 if a bit differs.
    """
    if question.memory and question.bits:
        raise ConfigError("doctor: say what to look at: --memory or --bits, or neither")
    if not question.memory and not question.bits:
        if script is not None:
            raise ConfigError(f"doctor: say what to look at in {script}: --memory or --bits; without a script, neither")
        return preflight(job.before, job.etcd, job.drives(), as_json=as_json)
    question.check()
    if script is None:
        raise ConfigError("doctor: name the script that --memory or --bits looks at")
    if not is_file(Path(script)):
        raise ConfigError(f"there is no script {script!r}: check the path")
    written = job.checkpoints.checkpoints()
    if question.bits:
        return bits(script, Script.of(script, args or []), as_json=as_json)
    # The script runs as a job of one, as under plain `python`, so variables set by a launcher are removed.
    names = (MEMORY_LIMIT, HOST_MEMORY_LIMIT, HOST_TIER, OFFLOAD_DIRS)
    around = {name: value for name in names if (value := inherited(name))}
    stages = stages_in(question.stages)
    environment = {**without("ELASTRAIN_"), **around, **replace(job.limits.limit(), stages=stages).environment()}
    environment |= {"OMP_NUM_THREADS": inherited("OMP_NUM_THREADS", "1")}
    environment |= written.environment() if written is not None else {}
    told = _asked(script, Script.of(script, args or []), question, environment)
    if as_json:
        print(json.dumps(told))
    else:
        _show(told)
    both = [*told["members"], *told.get("host", {}).get("members", ())]
    shortfall = next((each for each in both if each["shortfall"]), None)
    if shortfall is not None:
        say(f"member {shortfall['member']}: {shortfall['shortfall']}")
    return 1 if shortfall is not None else 0


def _asked(named: str, script: Script, question: QuestionFlags, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run the script, and return the answer that its own `prepare` writes.

    Raises ConfigError if the script never gets there, ElastrainError if it fails.
    """
    with held_folder("elastrain-doctor-") as folder:
        file = folder / "memory.json"
        # The script's own output goes to standard error, because it is no part of the answer.
        done = subprocess.run(
            [script.command, *script.args],
            env={**environment, **question.wish(file).environment()},
            stdout=sys.stderr.fileno(),
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
            check=False,
        )
        text = file.read_text() if file.is_file() else ""
    if text:
        told: dict[str, Any] = json.loads(text)
        return told
    if done.returncode:
        how = f"code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise ElastrainError(
            f"{named} ended with {how} before job.prepare, or with stages before step.backward: put right what it says "
            "above, and ask again"
        )
    raise ConfigError(
        f"{named} ended without calling job.prepare, so nothing is known of its model, or with stages without calling "
        "step.backward: name the script that trains"
    )


def _show(told: Mapping[str, Any]) -> None:
    _show_memory(told)
    if "host" in told:
        print()
        _show_memory({**told, **told["host"]})


def _show_memory(told: Mapping[str, Any]) -> None:
    members = told["members"]
    parts = {name: its for name, its in _PARTS.items() if any(m[name] for each in members for m in each["moments"])}
    rows = [(each["member"], each["node"], *(f"{each[part]:,}" for part in parts)) for each in members]
    print_table(("member", "node", *parts), rows)
    for part, meaning in parts.items():
        print(f"{part:<{max(map(len, parts))}}  {meaning}")
    worst = max(members, key=lambda each: each["total"])
    moments = [(each["moment"], *(f"{each[part]:,}" for part in parts)) for each in worst["moments"]]
    print_table((f"moments of {worst['member']}", *parts), moments)
    limit = f" of {told['limit']:,} allowed" if told["limit"] is not None else ""
    copies = min(told["backups"], len(members) - 1)
    print(
        f"worst: member {worst['member']}, {worst['total']:,} bytes of {told['memory']}{limit}, {worst['moment']}; "
        f"backups of each shard: {copies}"
        + (
            ""
            if told["stages"] > 1 or told["memory"] == HOST
            else "; saved activations come on top, which only a step shows"
        )
    )
