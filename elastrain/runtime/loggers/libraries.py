"""The check that a logger's library is installed. The library itself is imported by the member that writes."""

from __future__ import annotations

from importlib.util import find_spec

from elastrain.errors import ConfigError


def check_installed(logger: str, package: str) -> None:
    """Raise ConfigError, the same on all members, unless the package is installed."""
    if find_spec(package) is None:
        raise ConfigError(f"elastrain.{logger}(…) needs the package {package}: pip install {package}")
