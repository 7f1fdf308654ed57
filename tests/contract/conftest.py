"""A real etcd, and a quorum of three real ones, for the suites of this folder. Each is started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from tests.support.quorum_members import LocalQuorum


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd(tmp_path_factory.mktemp("etcd") / "etcd")
    yield server
    server.close()


@pytest.fixture(scope="session")
def local_quorum(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalQuorum]:
    quorum = LocalQuorum(tmp_path_factory.mktemp("quorum"))
    yield quorum
    quorum.close()
