"""Hosts made of network namespaces, with an etcd at the switch that all runs use."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastrain.launcher.namespaces.impairments import Condition, Loss, between, condition
from elastrain.launcher.namespaces.switch import SWITCH, SWITCH_ADDRESS, Switch
from elastrain.launcher.simulated.embedded_etcd import find_program

ETCD = f"{SWITCH_ADDRESS}:2379"


@contextmanager
def hosts_with_etcd(folder: Path, hosts: Sequence[str]) -> Iterator[Switch]:
    """All is gone when the block is left."""
    with Switch(f"{os.getpid()}", hosts) as switch:
        url, data = f"http://{ETCD}", str(folder / "etcd")
        options = ["--listen-client-urls", url, "--advertise-client-urls", url, "--data-dir", data, "--unsafe-no-fsync"]
        with (folder / "etcd.log").open("wb") as log:
            process = subprocess.Popen(
                [*switch.inside(SWITCH), find_program(), *options, "--log-level", "error"], stdout=log, stderr=log
            )
        try:
            yield switch
        finally:
            process.kill()
            process.wait()


def cut(switch: Switch, host: str) -> None:
    """Nothing arrives there or from there any more, and nobody is told."""
    switch.apply(condition([Loss(pairs=between([host], [SWITCH, *switch.hosts]))]))


def mend(switch: Switch) -> None:
    """All is well again; connections that have lived so long go on where they were."""
    switch.apply(Condition())
