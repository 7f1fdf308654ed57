"""Options for TLS and the login to an etcd of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.store.etcd_config import EtcdConfig, parse_endpoints


@dataclass(frozen=True, kw_only=True)
class EtcdFlags:
    """Options for TLS and the login to etcd."""

    heading: ClassVar = "Login to etcd"

    etcd_ca: Annotated[Path | None, typer.Option("--etcd-ca", help="TLS to etcd: the authority's certificate.")] = None
    etcd_cert: Annotated[Path | None, typer.Option("--etcd-cert", help="This node's certificate for etcd.")] = None
    etcd_key: Annotated[Path | None, typer.Option("--etcd-key", help="Its key.")] = None
    etcd_user: Annotated[str | None, typer.Option("--etcd-user", help="etcd's user.")] = None
    etcd_password_file: Annotated[
        Path | None, typer.Option("--etcd-password-file", help="A file (mode 0600) with that user's password.")
    ] = None

    def config(self, endpoint: str) -> EtcdConfig:
        """Return the configuration of the connection to etcd. Raises ConfigError."""
        return EtcdConfig(
            endpoints=parse_endpoints(endpoint),
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
            user=self.etcd_user,
            password=_password(self.etcd_password_file),
        )

    def refuse_with_join(self) -> None:
        """Raise ConfigError if an option is given that makes no sense with --join."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given:
            option = "--" + given[0].replace("_", "-")
            raise ConfigError(f"{option} is for an etcd of your own: leave it out with --join")


def _password(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"others may read the password file {file}: chmod 600 {file}")
        return file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password file {file} cannot be read: {error}") from None
