"""Registration of a node in a job of several nodes: the secret, the terms, a unique name, and an incarnation number.

Runs once, before the agent, and may wait for the store. Errors are those that users see, one sentence each.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastrain.base.environment import job_of, scope
from elastrain.errors import ConfigError
from elastrain.launcher.nodes.isolation_probe import who_answers
from elastrain.launcher.shared import clocks
from elastrain.launcher.shared.job_values import Life, NodeRecord
from elastrain.launcher.shared.rundir import SECRET_BYTES, make_secret
from elastrain.launcher.store.job_keys import JobKeys, decode_roster, decode_view
from elastrain.launcher.store.life_keys import life_key, read_life
from elastrain.launcher.store.port import ForgedValueError, Item, Store, StoreUnavailableError
from elastrain.launcher.store.registry import LEASE_S
from elastrain.launcher.store.sealed import SealedStore, hint_key

_LOOK_AGAIN_S = 0.2
_HISTORY = 50
"""Number of transactions that a store reaches after a few minutes of use."""
_HINT_S = 60.0
"""Seconds that the hint lives by itself. Afterwards it is put again under the lease of the job's keys."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Settings on which all nodes of a job must agree before it starts."""

    nodes: str
    script: str
    layout: str
    """Layout of its checkpoints: shared or local."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A registered node's access to the job: the store, the keys, its incarnation, and the current life."""

    store: SealedStore
    keys: JobKeys
    incarnation: int
    life: Life
    is_new: bool
    """True if the store has little history: it was made for this job, or has lost its data."""


def enter(store: Store, job: str, node: str, terms: Terms, *, file: Path, key_ttl_s: float) -> Place:
    """Register the node in the job, with the secret in the file. Raises ConfigError, StoreError."""
    is_new = store.list(JobKeys(store, job).prefix).revision < _HISTORY
    secret, made = secret_of(store, job, file)
    sealed = SealedStore(store, secret)
    try:
        keys, incarnation, life = _enter_the_life_that_stands(sealed, job, node, terms, key_ttl_s)
    except ForgedValueError:
        if not made:
            raise
        raise ConfigError(_withdraw(store, job, file)) from None
    _leave_hint(store, job, file, keys.lease(), made=made)
    return Place(store=sealed, keys=keys, incarnation=incarnation, life=life, is_new=is_new)


def _enter_the_life_that_stands(
    store: SealedStore, job: str, node: str, terms: Terms, key_ttl_s: float
) -> tuple[JobKeys, int, Life]:
    """Register in the current life, and return its keys, the incarnation and the life.

    Repeats if the next life begins meanwhile, because the node may have read keys of the older one.
    """
    while True:
        life = read_life(store, job)[1]
        keys = JobKeys(store, scope(job, life.number), key_ttl_s)
        incarnation = enrol(keys, store, job, node, terms)
        if read_life(store, job)[1].number == life.number:
            return keys, incarnation, life


def secret_of(store: Store, job: str, file: Path) -> tuple[bytes, bool]:
    """Return the job's secret from the file, and True if this call created the file, as on a job's first use.

    Raises ConfigError.
    """
    made = False
    hint = hint_key(job)
    there = store.get(hint)
    alive = bool(store.list(JobKeys(store, job).prefix).items) or store.get(life_key(job)) is not None
    if not file.exists():
        if there is not None and alive:
            raise ConfigError(_copy(job, there, file))
        made = _make(file)
    secret = read_secret(file)
    if there is None or not alive:
        revision = there.revision if there is not None else 0
        store.commit(expect={hint: revision}, put={hint: _here(file)}, lease=store.grant(_HINT_S))
    return secret, made


def _leave_hint(store: Store, job: str, file: Path, lease: int | None, *, made: bool) -> None:
    """Put the location of the secret file into the store, for as long as the job's other keys live."""
    hint = hint_key(job)
    there = store.get(hint)
    if made or (there is not None and there.value == _here(file)):
        store.commit(expect={hint: there.revision if there is not None else 0}, put={hint: _here(file)}, lease=lease)


def _withdraw(store: Store, job: str, file: Path) -> str:
    """Delete the secret that this node has made, and return the error text.

    Nodes that start a job at the same moment each make a secret. The job uses that of the first node to write.
    """
    file.unlink(missing_ok=True)
    hint = hint_key(job)
    there = store.get(hint)
    if there is not None and there.value == _here(file):
        store.commit(expect={hint: there.revision}, delete=[hint])
        there = None
    return f"another node began job {job} with a secret of its own; the one just made here is removed again: " + (
        _copy(job, there, file) if there is not None else f"copy that node's secret file to {file} (mode 0600)"
    )


def _here(file: Path) -> bytes:
    return f"{socket.gethostname()}:{file}".encode()


def read_secret(file: Path) -> bytes:
    """Return the secret. Raises ConfigError if other users may read the file, or if it is too short."""
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read the secret file {file}: chmod 600 {file}")
        secret = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the secret file {file} cannot be read: {error}") from None
    if len(secret) < SECRET_BYTES:
        raise ConfigError(f"the secret file {file} holds {len(secret)} bytes; {SECRET_BYTES} random ones are needed")
    return secret


def _make(file: Path) -> bool:
    try:
        file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        make_secret(file)
    except FileExistsError:
        return False  # another node of this machine or with the same folder was faster
    except OSError as error:
        raise ConfigError(f"the secret file {file} cannot be made: {error}") from None
    return True


def _copy(job: str, there: Item, file: Path) -> str:
    words = "".join(c for c in there.value.decode(errors="replace")[:300] if c.isprintable())
    return f"this node has no secret for job {job}: copy {words} to {file} (mode 0600), or name it by --secret-file"


def enrol(keys: JobKeys, store: SealedStore, job: str, node: str, terms: Terms) -> int:
    """Register as `node`, and return the incarnation number. Raises ConfigError, StoreError."""
    nodes = _once_the_name_is_free(keys, store, job, node)
    if not nodes:
        _clear_what_a_dead_job_left(keys, store)
    agreed = keys.put_once("job", vars(terms))
    for what, ours in vars(terms).items():
        if agreed.get(what) != ours:
            raise ConfigError(
                f"a job {job} runs already, with {what} {agreed.get(what)} (here: {ours}): choose another --rdzv-id, "
                "or start all its nodes alike"
            )
    return keys.take_number("incarnations", at_least=least_start(keys.records(nodes).values(), clocks.wall_s()))


def least_start(nodes: Iterable[NodeRecord], now_s: float) -> int:
    """Return the least incarnation number: the time in milliseconds, or more than every present node's number.

    A store that lost its data lost its counter, too, and some nodes may be absent. If a number were used twice, the
    other nodes could not tell the node from its predecessor. The counter protects against jumps of the clock.
    """
    latest = max((record.incarnation for record in nodes), default=0)
    return max(latest + 1, int(now_s * 1000))


def _once_the_name_is_free(keys: JobKeys, store: Store, job: str, node: str) -> Mapping[str, Item]:
    """Return the keys of all nodes, once none has this name. Waits for the lease of a node that just died."""
    return _wait_for(
        lambda: {item.key: item for item in store.list(keys.node("")).items},
        lambda nodes: keys.node(node) not in nodes,
        f"a node {node} takes part in job {job} already: choose another --rdzv-id for another job, or another "
        "--node-name",
    )


def _clear_what_a_dead_job_left(keys: JobKeys, store: SealedStore) -> None:
    """Remove the keys of a job whose agents were all killed.

    An outage of the store looks the same at first. Raises StoreUnavailableError if the job lives and only its nodes do
    not reach the store.
    """
    dead = store.list(keys.prefix).items
    there = {item.key.removeprefix(keys.prefix): item.value for item in dead}
    if "roster" not in there:
        return
    deadline_s = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < deadline_s:
        if store.list(keys.node("")).items:
            return
        time.sleep(_LOOK_AGAIN_S)
    view = decode_view(there["view"]) if "view" in there else None
    living = who_answers(decode_roster(there["roster"]), view, secret=store.secret, scope=keys.life)
    if living is not None:
        raise StoreUnavailableError(
            f"{living} of job {job_of(keys.life)} lives, and no node of it has a key in the store: they are cut off "
            "from it; nothing is begun beside them: start this node again when they reach the store."
        )
    # Remove only what was seen above: another starting node may have cleared the keys and begun the job again.
    keys.remove(dead)


def _wait_for(
    look: Callable[[], Mapping[str, Item]], good: Callable[[Mapping[str, Item]], bool], sentence: str
) -> Mapping[str, Item]:
    """Look repeatedly until the nodes found are good, and return them. Raises ConfigError after three leases."""
    deadline_s = time.monotonic() + 3 * LEASE_S
    while not good(found := look()):
        if time.monotonic() > deadline_s:
            raise ConfigError(sentence)
        time.sleep(_LOOK_AGAIN_S)
    return found
