"""The way from the options of a run to a running agent: alone, or as one node of several.

Connects the parts. Decisions about the job and the parsing of options are made elsewhere.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from elastrain.base.checkpoint_settings import SHARED
from elastrain.errors import ConfigError
from elastrain.launcher.agent import node_cache
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.core.places.quarantine import quarantined
from elastrain.launcher.shared import process_environment, rundir
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.job_values import End, JobConfig, Life
from elastrain.launcher.shared.places import NodeHistory
from elastrain.launcher.shared.process_environment import missing_extra
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.shared.screen import keep_in
from elastrain.launcher.start.restarts import Following, LifeEnd, SharedLives, after_alone, tell
from elastrain.launcher.start.run_options import NodeOptions, RunOptions
from elastrain.launcher.start.start_checkpoint import find_start, held_place, newest_step
from elastrain.launcher.store.etcd_config import EtcdConfig

if TYPE_CHECKING:
    from elastrain.launcher.agent.adopted import WorkerSource
    from elastrain.launcher.agent.agent import AgentConfig
    from elastrain.launcher.store.etcd import EtcdStore

_GRPC_VERBOSITY = "GRPC_VERBOSITY"
_SETTLE_S = 6.0
"""Seconds of two leases. Nodes that know the job may restore it in this time."""
_SIGNALLED = 128
"""Base of the exit codes of nodes that were told to leave. Such a node does not come back by itself."""


def run_alone(options: RunOptions) -> End:
    """Run a job of one node with a store in memory, one life after the other. Raises ConfigError."""
    from elastrain.launcher.agent.agent import Agent
    from elastrain.launcher.store.port import MemoryStore

    with ExitStack() as stack:
        stack.enter_context(held_place(options))
        life = Life()
        started = _with_start(options, life)  # first, so that a refused job leaves no files behind
        options = options.with_own_log_dir()
        guardian = stack.enter_context(Guardian("AGENT", process_environment.without("ELASTRAIN_")))
        run = rundir.create(options.output.run_dir, options.job)
        stack.callback(run.secret.unlink, missing_ok=True)
        guardian.remove(run.secret)
        guardian.remove(node_cache.folder_of(run))
        stack.callback(node_cache.remove, run)
        keep_in(run.events)
        say(f"job {options.job}, {count(options.size.workers, 'worker')}; run folder {run.path}")
        while True:
            faults = options.faults_from(time.monotonic())
            config = options.config(life=started)
            agent = Agent(agent_config(options, config, run), MemoryStore(), guardian, faults)
            ended = LifeEnd(life=life, end=agent.run(), first_member=agent.first_unused_member)
            history = agent.history
            following = after_alone(ended, _newest_step(options, ended.end))
            end = _tell(options, run, following, ended)
            if following.life is None:
                return end
            options, life = _options_of(options, following.life), following.life
            started = replace(_with_start(options, life), **vars(history))
            if reason := _why_quarantined(options, "node0", history):
                return End(code=1, sentence=reason)


def run_node(options: RunOptions, node: NodeOptions, run: RunDir | None = None) -> End:
    """Run one node of several, one life after the other. `run` is given if the nodes are simulated.

    Raises ConfigError, StoreError.
    """
    with held_place(options):
        return _run_lives(options if run is not None else options.with_own_log_dir(), node, run)


def _run_lives(options: RunOptions, node: NodeOptions, run: RunDir | None) -> End:
    history = NodeHistory()
    with ExitStack() as stack:
        while True:
            ended, run, history = _run_life(options, node, run, history)
            stack.callback(node_cache.remove, run)
            if ended.end.code == 0 or ended.end.code > _SIGNALLED or options.are_ranks_adopted:
                return ended.end
            following = shared_lives(options, node.etcd, run).after(ended, _newest_step(options, ended.end))
            end = _tell(options, run, following, ended)
            if following.life is None:
                return end
            options = _options_of(options, following.life)
            if reason := _why_quarantined(options, node.name, history):
                return End(code=1, sentence=reason, everywhere=False, job_is_over=False)


def _why_quarantined(options: RunOptions, node: str, history: NodeHistory) -> str:
    return quarantined(node, history.losses_s, options.size.quarantine)


def _options_of(options: RunOptions, life: Life) -> RunOptions:
    """Return the options for a life. Restarts of all workers repeat the first one."""
    return options if life.is_first else options.in_a_later_life()


def _run_life(
    options: RunOptions, node: NodeOptions, run: RunDir | None, history: NodeHistory
) -> tuple[LifeEnd, RunDir, NodeHistory]:
    """Run this node's part of the job's current life. The first life creates the run's folder.

    `history` is of earlier lives; the one at the end is returned.
    """
    from elastrain.launcher.agent.agent import Agent
    from elastrain.launcher.start.registration import Terms, enter

    plain = etcd_store(node.etcd)
    try:
        plain.check()
        terms = Terms(
            nodes=options.size.terms,
            script=options.target,
            layout=options.checkpoints.layout if options.checkpoints is not None else SHARED,
        )
        place = enter(plain, options.job, node.name, terms, file=node.secret_file, key_ttl_s=options.waits.key_ttl_s)
        if run is None:
            run = rundir.create(options.output.run_dir, options.job, secret_file=node.secret_file)
            say(f"job {options.job}, node {node.name}, {count(options.size.workers, 'worker')}; run folder {run.path}")
        keep_in(run.events)
        has_begun = place.store.get(place.keys.prefix + "roster") is not None
        # A node that joins in a later life was started with the same command as all others.
        options = _options_of(options, place.life)
        life = place.life if has_begun else _with_start(options, place.life)
        life = replace(life, **vars(history))
        config = options.config(node=node.name, incarnation=place.incarnation, life=life)
    except BaseException:
        plain.close()
        raise
    with Guardian("AGENT", process_environment.without("ELASTRAIN_")) as guardian:
        faults = options.faults_from(time.monotonic())
        is_ours = node.has_own_store or place.life.number > 1
        settle_s = _SETTLE_S if place.is_new and not is_ours else 0.0
        agent = Agent(
            replace(agent_config(options, config, run, node), settle_s=settle_s), place.store, guardian, faults
        )
        with node_cache.kept_unless_broken(run, guardian):
            end, is_local = agent.run(), options.checkpoints is not None and options.checkpoints.is_local
        ended = LifeEnd(life=place.life, end=end, first_member=agent.first_unused_member, is_local=is_local)
        return ended, run, agent.history


def _with_start(options: RunOptions, life: Life) -> Life:
    """Return the life with the checkpoint that this node would start it from. Raises ConfigError."""
    found = find_start(options, life.number)
    return replace(life, resume=found.resume, start=found.sentence, offers=found.offers, named=found.named)


def shared_lives(options: RunOptions, etcd: EtcdConfig, run: RunDir) -> SharedLives:
    """Return the lives of a job of several nodes. Raises OSError if the job's secret cannot be read."""
    return SharedLives(
        job=options.job,
        secret=run.secret.read_bytes(),
        key_ttl_s=options.waits.key_ttl_s,
        park_timeout_s=options.waits.park_timeout_s,
        open_store=lambda: etcd_store(etcd),
    )


def _newest_step(options: RunOptions, end: End) -> int | None:
    """Return the newest checkpoint's step if the state was lost, else None. A look at the disk may be slow."""
    return newest_step(options) if end.lost and not end.again else None


def _tell(options: RunOptions, run: RunDir, following: Following, ended: LifeEnd) -> End:
    if (
        options.checkpoint_dir is None and not ended.end.again
    ):  # the sentence says already that the state cannot be restored
        return ended.end
    with closing(EventLog(run.events, "launcher")) as log:
        end = tell(following, ended, log)
    # The agent wrote the end of its life there. `status` should show whether the job is over.
    goes_on = {"state": "starting", "exit_code": None, "end": None}
    run.write_state(run.read_state() | (goes_on if following.life is not None else {"end": asdict(end)}))
    return end


def etcd_store(config: EtcdConfig) -> EtcdStore:
    """Connect to etcd. gRPC, which reads its verbosity on import, prints no messages unless the user asked for them."""
    with process_environment.set_for_a_moment(_GRPC_VERBOSITY, process_environment.inherited(_GRPC_VERBOSITY, "NONE")):
        try:
            from elastrain.launcher.store.etcd import EtcdStore
        except ModuleNotFoundError as error:
            raise missing_extra("a job of several nodes", "nodes", error) from None
    return EtcdStore(config)


def agent_config(options: RunOptions, settings: JobConfig, run: RunDir, node: NodeOptions | None = None) -> AgentConfig:
    """Return the agent's configuration. `node` is given for one node of several."""
    from elastrain.launcher.agent.agent import AgentConfig

    host = node.host if node is not None else None
    return AgentConfig(
        job=options.job,
        settings=settings,
        run=run,
        source=_source(options),
        wish=options.wish,
        checkpoints=options.checkpoints,
        logs=options.output.logs(run),
        host=host or "127.0.0.1",
        one_host=host is None,
        stop_grace_s=options.waits.stop_grace_s,
        key_ttl_s=options.waits.key_ttl_s,
    )


def _source(options: RunOptions) -> WorkerSource:
    if not (options.size.standby and isinstance(options.script, Script)):
        return options.script
    from elastrain.launcher.agent.standby import StandbySource

    return StandbySource(options.script)


def address_towards(endpoint: str) -> str:
    """Return this machine's address on the route to HOST:PORT, which other nodes can reach. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: there is no way to it from here ({error})") from None


def report(end: End) -> int:
    """Print the end of the job on the screen, and return the exit code."""
    say_last(end.sentence, end.detail)
    return end.code


def say_last(sentence: str, detail: str) -> None:
    """Print the last sentence, followed by `detail`, a traceback."""
    say(sentence + (f"\n{detail.rstrip()}" if detail else ""))


def count(number: int, noun: str) -> str:
    """Return the number with its noun, such as "2 workers"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
