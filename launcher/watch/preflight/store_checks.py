"""Checks of etcd: each endpoint's answer and version, and whether this node is admitted."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request

from elastrain.errors import ElastrainError
from elastrain.launcher.start.starting import etcd_store
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.port import StoreError
from elastrain.launcher.watch.preflight.check import StartCheck, judged

_TIMEOUT_S = 4.0
_OLDEST = (3, 4)


def look(config: EtcdConfig) -> list[StartCheck]:
    """Ask each endpoint for its version, then read as a job would."""
    versions = [_version(endpoint, config) for endpoint in config.endpoints]
    return [*versions, _admitted(config)]


def of_version(endpoint: str, version: str) -> StartCheck:
    """Judge the version of an etcd server."""
    found = re.match(r"(\d+)\.(\d+)", version)
    is_old = found is None or (int(found[1]), int(found[2])) < _OLDEST
    oldest = ".".join(map(str, _OLDEST))
    return judged(f"etcd {endpoint}", f"version {version}", stops=is_old, advice=f"use etcd {oldest} or newer")


def _version(endpoint: str, config: EtcdConfig) -> StartCheck:
    context = None
    if config.ca is not None:
        context = ssl.create_default_context(cafile=str(config.ca))
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.key)
    url = f"{'http' if context is None else 'https'}://{endpoint}/version"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context) as answer:
            version = str(json.loads(answer.read(4096))["etcdserver"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error.reason) if isinstance(error, urllib.error.URLError) else str(error) or type(error).__name__
        # Other endpoints may be enough for a job. `_admitted` says if they are.
        return judged(f"etcd {endpoint}", reason, warns=True, advice="start it, or check address, port and TLS")
    return of_version(endpoint, version)


def _admitted(config: EtcdConfig) -> StartCheck:
    try:
        store = etcd_store(config)
    except ElastrainError as error:
        return judged("etcd", str(error), stops=True, advice="install what is missing")
    try:
        store.check()
    except StoreError as error:
        return judged("etcd", str(error), stops=True, advice="check --rdzv-endpoint, and the options --etcd-…")
    finally:
        store.close()
    return judged("etcd", "answers and admits this node")
