"""Every port on which a job listens lies in --port-range; a range that is taken or too small is one sentence."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from elastrain.comm.wire.addresses import MeshConfig
from elastrain.comm.wire.connector import _listen_tcp
from elastrain.comm.wire.ports import bind_within
from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import WorkerWish
from elastrain.launcher.cli.options.node_options import RendezvousFlags, port_range
from elastrain.launcher.nodes.agent_links import listen
from elastrain.launcher.quorum.join_hosts import ports_beside
from elastrain.launcher.start.run_options import JobSize


def free_range(count: int) -> tuple[int, int]:
    """Ports that follow one another and are free now."""
    for first in range(43000, 60000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first, first + count - 1
    raise AssertionError("no free ports")


def test_all_ports_of_a_range_are_found_and_then_none() -> None:
    ports = free_range(5)
    with ExitStack() as stack:
        found = set()
        for _ in range(5):
            sock = stack.enter_context(socket.socket())
            bind_within(sock, "127.0.0.1", ports)
            found.add(sock.getsockname()[1])
        assert found == set(range(ports[0], ports[1] + 1))
        with pytest.raises(OSError, match=f"no port from {ports[0]} to {ports[1]} is free"):
            bind_within(stack.enter_context(socket.socket()), "127.0.0.1", ports)


def test_agents_and_members_listen_within_the_range() -> None:
    ports = free_range(4)
    assert MeshConfig(transport="tcp", ports=ports).ports == ports
    with listen("127.0.0.1", ports) as agent, _listen_tcp("127.0.0.1", ports) as member:
        assert {agent.getsockname()[1], member.getsockname()[1]} <= set(range(ports[0], ports[1] + 1))
    assert WorkerWish(ports=ports).environment() == {"ELASTRAIN_PORT_RANGE": f"{ports[0]}-{ports[1]}"}


@pytest.mark.parametrize("text", ["", "30000", "30000-29999", "80-90", "1024-65536", "a-b"])
def test_a_wrong_range_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="write A-B, such as 30000-30999"):
        port_range(text)


def test_a_range_that_is_too_small_or_taken_is_one_sentence() -> None:
    first, last = free_range(8)
    size = JobSize(workers=2)
    flags = RendezvousFlags(port_range=f"{first}-{last}", local_addr="127.0.0.1")
    assert flags.ports(size, nodes_here=1) == (first, last)
    assert RendezvousFlags().ports(size, nodes_here=1) is None
    with pytest.raises(ConfigError, match=f"--port-range {first}-{last}: 8 ports, and 13 are needed here"):
        flags.ports(size, nodes_here=2)
    with ExitStack() as stack:
        for port in range(first, first + 4):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match=f"--port-range {first}-{last}: 4 ports are free, and 6 are needed here"):
            flags.ports(size, nodes_here=1)


@pytest.mark.parametrize(
    ("join", "left"),
    [
        ("a,b,c", (30003, 30009)),
        ("a:30000", (30003, 30009)),
        ("a:30007,b:30007", (30000, 30006)),
        ("a:30001", (30004, 30009)),
    ],
)
def test_quorum_has_three_ports_of_the_range_and_leaves_the_rest(join: str, left: tuple[int, int]) -> None:
    assert ports_beside(join, (30000, 30009)) == left


@pytest.mark.parametrize("port", [29400, 29999, 30008, 30009, 30010])
def test_ports_of_the_quorum_outside_of_the_range_are_one_sentence(port: int) -> None:
    sentence = f"--join a:{port}: its ports {port} to {port + 2} do not lie in --port-range 30000-30009"
    with pytest.raises(ConfigError, match=sentence):
        RendezvousFlags(port_range="30000-30009", join=f"a:{port}").ports(JobSize(workers=1), nodes_here=1)


def test_a_range_without_room_beside_the_quorum_is_one_sentence() -> None:
    first, _ = free_range(8)
    size = JobSize(workers=1)

    def flags(count: int) -> RendezvousFlags:
        return RendezvousFlags(port_range=f"{first}-{first + count - 1}", join="127.0.0.1", local_addr="127.0.0.1")

    assert flags(7).ports(size, nodes_here=1) == (first + 3, first + 6)
    assert flags(7).join_port() == first
    assert RendezvousFlags(join="127.0.0.1").join_port() == 29400
    with pytest.raises(ConfigError, match="3 ports, and 4 are needed here beside the three of --join"):
        flags(6).ports(size, nodes_here=1)
    with pytest.raises(ConfigError, match=r"its ports .* do not lie in --port-range"):
        flags(2).ports(size, nodes_here=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 4))
        with pytest.raises(ConfigError, match="3 ports are free, and 4 are needed here beside the three of --join"):
            flags(7).ports(size, nodes_here=1)
