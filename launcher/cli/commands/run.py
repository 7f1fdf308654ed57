"""Command `elastrain run`: start a job, or this machine's part of one, and stay until it ends.

torchrun's flags keep their meaning. `options` declares and checks the options; `starting` carries them out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from elastrain.launcher.cli.options.checkpoint_options import CheckpointFlags, ResumeFlags
from elastrain.launcher.cli.options.etcd_options import EtcdFlags
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.job_options import FaultFlags, MemoryFlags, WaitFlags
from elastrain.launcher.cli.options.node_options import RendezvousFlags, SizeFlags
from elastrain.launcher.cli.options.output_options import OutputFlags, ScriptFlags
from elastrain.launcher.cli.options.slurm_options import Completed, from_slurm
from elastrain.launcher.cli.options.torchrun import refuse_backend, refuse_unknown
from elastrain.launcher.cli.options.watch_options import WatchFlags
from elastrain.launcher.schedulers.slurm import task_of
from elastrain.launcher.shared import process_environment, rundir
from elastrain.launcher.shared.process_environment import missing_extra
from elastrain.launcher.shared.screen import shared
from elastrain.launcher.start.run_options import RunOptions
from elastrain.launcher.start.starting import report, run_alone, run_node
from elastrain.launcher.watch.metrics.metrics_process import metrics


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """All options of `run`, in the order of its help."""

    size: SizeFlags
    rendezvous: RendezvousFlags
    etcd: EtcdFlags
    output: OutputFlags
    script: ScriptFlags
    memory: MemoryFlags
    waits: WaitFlags
    faults: FaultFlags
    resume: ResumeFlags
    checkpoints: CheckpointFlags
    watch: WatchFlags

    def inside(self, slurm: Completed) -> RunFlags:
        """Return the options with those that Slurm gives."""
        output = replace(self.output, run_dir=self.output.run_dir or slurm.run_dir)
        return replace(self, size=slurm.size, rendezvous=slurm.rendezvous, output=output)

    def options(self, target: str, args: list[str]) -> RunOptions:
        """Return all options, checked. Raises ConfigError."""
        refuse_unknown(target)
        refuse_backend(self.rendezvous.rdzv_backend)
        script, job = self.script.script(target, args), self.rendezvous.job()
        size, checkpoints = self.size.size(self.rendezvous), self.checkpoints.checkpoints()
        output = self.output.output(size.workers, self.script)
        if size.standby:
            self.script.check_standby(output)
        here = size.all_nodes if self.size.local_nodes is not None else 1
        ports = self.rendezvous.ports(size, nodes_here=here)
        return RunOptions(
            job=job,
            script=script,
            target=target,
            size=size,
            output=output,
            wish=replace(
                self.memory.limit(),
                stages=self.size.stages_of(size),
                has_standing_shadows=self.size.standing_shadows,
                shares_compile_cache=self.rendezvous.share_compile_cache,
                ports=ports,
            ),
            waits=self.waits.waits(),
            armed=self.faults.armed,
            faults=self.faults.read(),
            began_s=time.monotonic(),
            checkpoints=checkpoints.started_from(self.resume.folder()) if checkpoints is not None else None,
            resume=self.resume.wish(),
        )


@grouped
def run(
    script: Annotated[
        str, typer.Argument(help="The script to run, or a module with -m, or a program with --no-python.")
    ],
    flags: RunFlags,
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.", metavar="ARGS...")] = None,
) -> int:
    """Run SCRIPT in as many workers as asked for; start again what dies; end when the work is done.

    RUN OPTIONS come before the script; all that follows it belongs to the script. In the workers OMP_NUM_THREADS is 1
    and PYTHONHASHSEED is 0 unless they are set.
    """
    slurm = from_slurm(flags.size, flags.rendezvous, task_of(process_environment.slurm()))
    flags = flags.inside(slurm)
    options = flags.options(script, args or [])
    flags.faults.check(has_launcher=flags.size.local_nodes is not None)
    folder = options.output.run_dir or rundir.runs_folder() / options.job
    with metrics(flags.watch.metrics(), folder.absolute()), shared():
        return _run(options, flags)


def _run(options: RunOptions, flags: RunFlags) -> int:
    if flags.size.local_nodes is not None:
        try:
            from elastrain.launcher.simulated.simulated_nodes import run_local_nodes
        except ModuleNotFoundError as error:
            raise missing_extra("a job of several nodes", "embedded", error) from None
        return run_local_nodes(options, netns=flags.size.netns)
    if flags.rendezvous.join is not None:
        return _run_joined(options, flags, flags.rendezvous.join)
    if options.size.all_nodes == 1:
        return report(run_alone(options))
    assert flags.rendezvous.rdzv_endpoint is not None
    etcd = flags.etcd.config(flags.rendezvous.rdzv_endpoint)
    return report(run_node(options, flags.rendezvous.node(etcd)))


def _run_joined(options: RunOptions, flags: RunFlags, hosts: str) -> int:
    flags.etcd.refuse_with_join()
    try:
        from elastrain.launcher.quorum.joining import JoinWish, run_joined
    except ModuleNotFoundError as error:
        raise missing_extra("--join", "embedded", error) from None
    rendezvous = flags.rendezvous
    wish = JoinWish(
        hosts=hosts,
        node=rendezvous.name(),
        address=rendezvous.address(),
        secret_file=rendezvous.secret(),
        port=rendezvous.join_port(),
    )
    return report(run_joined(options, wish))
