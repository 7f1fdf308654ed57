"""The stay of a node whose workers have ended, as long as other nodes need its etcd member.

Another launcher may end the ranks of one host alone. The other hosts go on, and the members of the quorum cannot always
be replaced: a job of two hosts has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastrain.launcher.shared.console import say
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import Store, StoreError

_LOOK_S = 0.5
TELL_S = 3.0
"""Seconds of a stay after which the screen tells of it. At the end of a job, nodes end within moments."""
SILENT_S = 10.0
"""Seconds without an answer of the quorum after which a node stays no longer."""


def stay_for_others(store: Store, keys: JobKeys, node: str, is_member: Callable[[], bool]) -> None:
    """Wait until no other node has a key, or until this node has no etcd member any more."""
    began_s = answered_s = time.monotonic()
    has_told = False
    while is_member() and time.monotonic() - answered_s < SILENT_S:
        try:
            others = [item.key for item in store.list(keys.node("")).items if item.key != keys.node(node)]
        except StoreError:
            time.sleep(_LOOK_S)
            continue
        answered_s = time.monotonic()
        if not others:
            return
        if not has_told and answered_s - began_s >= TELL_S:
            say(f"{node}: this process stays, because the other hosts need its etcd member")
            has_told = True
        time.sleep(_LOOK_S)
