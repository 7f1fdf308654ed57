"""How a node enters a job of several: the secret, the terms, a name of its own, a number for this start.

Runs once, before the agent, and may wait for the store. Raises the errors that users meet, each one sentence.
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
from elastrain.launcher.shared.job_values import Life, NodeRecord
from elastrain.launcher.shared.rundir import SECRET_BYTES, make_secret
from elastrain.launcher.store.job_keys import JobKeys, decode_roster, decode_view
from elastrain.launcher.store.life_keys import life_key, read_life
from elastrain.launcher.store.port import ForgedValueError, Item, Store, StoreUnavailableError
from elastrain.launcher.store.registry import LEASE_S
from elastrain.launcher.store.sealed import SealedStore, hint_key

_LOOK_AGAIN_S = 0.2
_HISTORY = 50
"""Transactions that a store has had after a few minutes of use."""
_HINT_S = 60.0
"""Until the job has keys, under whose lease the hint is put again."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all nodes of a job must agree about before anything starts."""

    nodes: str
    script: str
    layout: str
    """Of its checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a node has when it has entered."""

    store: SealedStore
    keys: JobKeys
    incarnation: int
    life: Life
    is_new: bool
    """The store has no history: it was made for this job, or has lost its data."""


def enter(store: Store, job: str, node: str, terms: Terms, *, file: Path, key_ttl_s: float) -> Place:
    """Take part in the job with the secret in the file. Raises ConfigError, StoreError."""
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
    """Whoever comes while one life ends and the next begins may have read of the older one."""
    while True:
        life = read_life(store, job)[1]
        keys = JobKeys(store, scope(job, life.number), key_ttl_s)
        incarnation = enrol(keys, store, job, node, terms)
        if read_life(store, job)[1].number == life.number:
            return keys, incarnation, life


def secret_of(store: Store, job: str, file: Path) -> tuple[bytes, bool]:
    """The job's secret, from the file, and whether this call made it: so it is on the job's first use.

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
    """Where the secret lies, for as long as the job's other keys: said by whoever has made it."""
    hint = hint_key(job)
    there = store.get(hint)
    if made or (there is not None and there.value == _here(file)):
        store.commit(expect={hint: there.revision if there is not None else 0}, put={hint: _here(file)}, lease=lease)


def _withdraw(store: Store, job: str, file: Path) -> str:
    """Nodes that begin a job at once each make a secret; that of the first to write is the job's, not this one."""
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
    """Raises ConfigError where others may read it, or it is too short."""
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
        return False  # another node of this machine, or one that shares the folder, was faster
    except OSError as error:
        raise ConfigError(f"the secret file {file} cannot be made: {error}") from None
    return True


def _copy(job: str, there: Item, file: Path) -> str:
    words = "".join(c for c in there.value.decode(errors="replace")[:300] if c.isprintable())
    return f"this node has no secret for job {job}: copy {words} to {file} (mode 0600), or name it by --secret-file"


def enrol(keys: JobKeys, store: SealedStore, job: str, node: str, terms: Terms) -> int:
    """Take part as `node`; the number of this start. Raises ConfigError, StoreError."""
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
    return keys.take_number("incarnations", at_least=least_start(keys.records(nodes).values(), time.time()))


def least_start(nodes: Iterable[NodeRecord], now_s: float) -> int:
    """The least number that a start may bear: the time in milliseconds, or one more than those of the nodes there.

    A store that has lost its data has lost its count, too, and who is there may not be all: a number that a node's own
    predecessor had would make the others take the one for the other. With the count, the clock's jumps do no harm.
    """
    latest = max((record.incarnation for record in nodes), default=0)
    return max(latest + 1, int(now_s * 1000))


def _once_the_name_is_free(keys: JobKeys, store: Store, job: str, node: str) -> Mapping[str, Item]:
    """The nodes that are there. What died lately is given the time that its lease takes."""
    return _wait_for(
        lambda: {item.key: item for item in store.list(keys.node("")).items},
        lambda nodes: keys.node(node) not in nodes,
        f"a node {node} takes part in job {job} already: choose another --rdzv-id for another job, or another "
        "--node-name",
    )


def _clear_what_a_dead_job_left(keys: JobKeys, store: SealedStore) -> None:
    """Its agents were all killed: nobody has taken the keys along. An outage of the store looks the same at first.

    Raises StoreUnavailableError where the job lives, and only its nodes do not reach the store.
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
    # As it was seen at first: another node that starts now may have cleared it, and begun the job anew.
    keys.remove(dead)


def _wait_for(
    look: Callable[[], Mapping[str, Item]], good: Callable[[Mapping[str, Item]], bool], sentence: str
) -> Mapping[str, Item]:
    deadline_s = time.monotonic() + 3 * LEASE_S
    while not good(found := look()):
        if time.monotonic() > deadline_s:
            raise ConfigError(sentence)
        time.sleep(_LOOK_AGAIN_S)
    return found
