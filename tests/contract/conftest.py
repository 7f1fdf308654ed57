"""A real etcd for the suites of this folder, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd(tmp_path_factory.mktemp("etcd") / "etcd")
    yield server
    server.close()
