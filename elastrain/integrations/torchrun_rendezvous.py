"""The rendezvous backend `etcd-v3` of torchrun: `torchrun --rdzv-backend etcd-v3 --rdzv-endpoint HOST:PORT train.py`.

torch's own etcd backends speak etcd v2, which etcd 3.6 has removed. All keys of a rendezvous lie under
`/elastrain/.torchrun/RUN_ID/`. The state is a pickle of torch, so values are sealed with the job's secret, and only
bytes from a holder of the secret are unpickled. The secret's file is `--rdzv-conf secret_file=PATH`, by default that
of `elastrain run`. The options of etcd are `etcd_ca`, `etcd_cert`, `etcd_key`, `etcd_user` and `etcd_password_file`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store as TorchStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.cli.options.etcd_options import EtcdFlags
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.rundir import home
from elastrain.launcher.start.registration import secret_of
from elastrain.launcher.start.run_options import KEY_TTL_S
from elastrain.launcher.start.starting import etcd_store
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import Store, StoreError, StoreUnavailableError
from elastrain.launcher.store.sealed import SealedStore

NAME = "etcd-v3"
_LOOK_AGAIN_S = 0.1
_KEEP_ALIVE_S = 60.0
_TIMEOUT_S = 300.0
R = TypeVar("R")


class JobStore(TorchStore):
    """A c10d store over the port of our store, for what torchrun's agents tell each other. Outages are waited for."""

    def __init__(self, keys: JobKeys, store: Store) -> None:
        super().__init__()
        self._keys, self._store = keys, store

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value."""
        self._change(key, lambda _: value.encode() if isinstance(value, str) else bytes(value))

    def add(self, key: str, num: int) -> int:
        """Add to a number, which begins with 0, and return it."""
        return int(self._change(key, lambda before: str(int(before or b"0") + num).encode()))

    def get(self, key: str) -> bytes:
        """Return a value once it is there. Raises LookupError after the store's timeout."""
        return self._until(lambda: item.value if (item := self._store.get(self._keys.prefix + key)) else None, [key])

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all these keys are there."""
        return all(self._store.get(self._keys.prefix + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all these keys. Raises LookupError after the timeout."""
        self._until(lambda: self.check(keys) or None, keys, timeout)

    def _change(self, key: str, value_of: Callable[[bytes | None], bytes]) -> bytes:
        def change() -> bytes | None:
            there = self._store.get(name := self._keys.prefix + key)
            value = value_of(there.value if there is not None else None)
            expect = {name: there.revision if there is not None else 0}
            return None if self._keys.commit(expect, {name: value}) is None else value

        return self._until(change, [key])

    def _until(self, ask: Callable[[], R | None], keys: Sequence[str], timeout: timedelta | None = None) -> R:
        deadline_s = time.monotonic() + (timeout.total_seconds() if timeout is not None else _TIMEOUT_S)
        while True:
            try:
                if (answer := ask()) is not None:
                    return answer
            except StoreUnavailableError:
                pass  # it may come back
            if time.monotonic() > deadline_s:
                raise LookupError(f"{', '.join(keys)} did not come in time from etcd")
            time.sleep(_LOOK_AGAIN_S)


class Backend(RendezvousBackend):
    """torch's rendezvous state under one key. While the store is away, it returns the last state that it has seen."""

    name = NAME

    def __init__(self, keys: JobKeys, store: Store) -> None:
        self._keys, self._store, self._key = keys, store, f"{keys.prefix}state"
        self._seen: tuple[bytes, Any] | None = None
        self._alive_s = 0.0

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its revision, or None if there is none. Raises RendezvousConnectionError."""
        try:
            if time.monotonic() > self._alive_s + _KEEP_ALIVE_S:
                self._keys.keep()
                self._alive_s = time.monotonic()
            item = self._store.get(self._key)
        except StoreError as error:
            if self._seen is None or not isinstance(error, StoreUnavailableError):
                raise RendezvousConnectionError(str(error)) from None
            return self._seen
        self._seen = (item.value, item.revision) if item is not None else None
        return self._seen

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Put the state if it has still this revision. Returns the state that stands, and True if it is this one."""
        try:
            revision = self._keys.commit({self._key: token or 0}, {self._key: state})
        except StoreError:
            revision = None  # `get_state` says whether it is away
        if revision is not None:
            self._seen = state, revision
            return state, revision, True
        stands = self.get_state()
        return (*stands, False) if stands is not None else None


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes torchrun's handler. Entry point of the group `torchrun.handlers`."""
    return _make


def _make(params: RendezvousParameters) -> RendezvousHandler:
    try:
        store, keys = _open(params)
    except (ElastrainError, StoreError) as error:
        say(str(error))
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    made = create_handler(JobStore(keys, store), Backend(keys, store), params)
    next_round = made.next_rendezvous

    def next_rendezvous() -> Any:
        # An agent that stays the first one would not publish its address again, and a newcomer would wait for it.
        made._bootstrap_store_info = None
        return next_round()

    made.next_rendezvous = next_rendezvous  # type: ignore[method-assign]
    return made


def _open(params: RendezvousParameters) -> tuple[SealedStore, JobKeys]:
    told = {name: params.get(name) for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file")}
    paths: dict[str, Any] = {name: Path(value) for name, value in told.items() if value}
    plain = etcd_store(EtcdFlags(**paths, etcd_user=params.get("etcd_user")).config(params.endpoint))
    plain.check()
    job, named = f".torchrun/{params.run_id}", params.get("secret_file")
    sealed = SealedStore(plain, secret_of(plain, job, Path(named) if named else home() / "secret")[0])
    return sealed, JobKeys(sealed, job, KEY_TTL_S)
