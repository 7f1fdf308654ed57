"""The part of `elastrain doctor` without --memory and --bits: the checks of this machine before a job starts."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.etcd_options import EtcdFlags
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.console import print_table, say
from elastrain.launcher.watch.preflight.check import StartCheck, StartVerdict


@dataclass(frozen=True, kw_only=True)
class PreflightFlags:
    """Options for what a job of several nodes needs."""

    heading: ClassVar = "Before the start"

    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="The etcd to check: HOST:PORT[,…].")
    ] = None
    peers: Annotated[
        str | None, typer.Option("--peers", help="Machines that listen: HOST:PORT[,…]; measures the links to them.")
    ] = None
    listen: Annotated[
        int | None, typer.Option("--listen", min=1, max=65535, help="Answer other machines' --peers on this port.")
    ] = None
    secret_file: Annotated[
        Path | None, typer.Option("--secret-file", help="The job's secret, the same on all machines.")
    ] = None

    def addresses(self) -> list[tuple[str, int]]:
        """Return the hosts and ports of --peers. Raises ConfigError."""
        return [_address(part.strip()) for part in self.peers.split(",")] if self.peers is not None else []

    def secret(self) -> bytes:
        """Return the job's secret. Raises ConfigError."""
        from elastrain.launcher.start.registration import read_secret

        return read_secret((self.secret_file or rundir.home() / "secret").absolute())


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--peers {text!r}: write HOST:PORT[,HOST:PORT…]")
    return host.strip("[]"), int(port)


def preflight(flags: PreflightFlags, etcd: EtcdFlags, drives: Sequence[tuple[str, Path]], *, as_json: bool) -> int:
    """StartCheck this machine, and print the results. Returns 1 if something would stop a job."""
    from elastrain.launcher.watch.preflight import drive_checks, host_checks, machine_facts, peer_link, store_checks

    peers = flags.addresses()
    secret = flags.secret() if peers or flags.listen is not None else b""
    config = etcd.config(flags.rdzv_endpoint) if flags.rdzv_endpoint is not None else None
    mine = machine_facts.facts()
    if flags.listen is not None:
        with suppress(KeyboardInterrupt):
            _listen(flags.listen, secret, mine)
        return 0
    checks = [*machine_facts.of_this_machine(mine), *host_checks.look()]
    checks += [drive_checks.look(option, folder) for option, folder in drives]
    checks += drive_checks.ways([folder for option, folder in drives if option == "--offload-dir"])
    checks += store_checks.look(config) if config is not None else []
    checks += [check for peer in peers for check in peer_link.look(peer, secret, mine)]
    _print(checks, as_json=as_json)
    return 1 if any(check.verdict is StartVerdict.STOPS for check in checks) else 0


def _listen(port: int, secret: bytes, mine: dict[str, str]) -> None:
    from elastrain.launcher.watch.preflight.peer_link import serve

    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"--listen {port} cannot be opened: {error.strerror}; choose another port") from None
    say(f"listening on port {port} until Ctrl-C; on the other machines: elastrain doctor --peers THIS-HOST:{port}")
    with listener:
        serve(listener, secret, mine, say)


def _print(checks: Sequence[StartCheck], *, as_json: bool) -> None:
    if as_json:
        told = [
            {"name": each.name, "verdict": str(each.verdict), "found": each.found, "advice": each.advice}
            for each in checks
        ]
        print(json.dumps({"ok": all(each.verdict is not StartVerdict.STOPS for each in checks), "checks": told}))
        return
    signs = {StartVerdict.OK: "✓ ok", StartVerdict.WARNS: "! warns", StartVerdict.STOPS: "✗ stops"}
    print_table(("", "check", "found"), [(signs[each.verdict], each.name, each.found) for each in checks])
    for each in checks:
        if each.advice:
            print(f"{each.name}: {each.advice}")
