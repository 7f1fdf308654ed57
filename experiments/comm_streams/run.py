"""One TCP stream between two processes, or several?

`python -m experiments.comm_streams.run [--json]`. Two forked processes exchange a tensor in both directions at once
over loopback, as two hosts do in an all_reduce. Nothing of the communicator comes in here.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from experiments.harness import interleave, measure_and_print, quantile

SIZES = tuple(64 << 10 << 2 * power for power in range(6))  # 64 KiB to 64 MiB
STREAMS = (1, 2, 4)
ROUNDS = 7
BYTES_PER_CASE = 128 << 20
_WAIT_S = 60.0


def polled(socks: Sequence[socket.socket], out: list[memoryview], into: list[memoryview]) -> None:
    """All streams by one thread, as the communicator's does it."""
    selector = selectors.DefaultSelector()
    for index, sock in enumerate(socks):
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, index)
    waiting = [selectors.EVENT_READ | selectors.EVENT_WRITE] * len(socks)
    while any(waiting):
        for key, ready in selector.select(_WAIT_S):
            index, sock = key.data, socks[key.data]
            if ready & selectors.EVENT_READ:
                into[index] = into[index][sock.recv_into(into[index]) :]
            if ready & selectors.EVENT_WRITE:
                out[index] = out[index][sock.send(out[index]) :]
            left = (selectors.EVENT_READ if into[index] else 0) | (selectors.EVENT_WRITE if out[index] else 0)
            if left != waiting[index]:
                waiting[index] = left
                if left:
                    selector.modify(sock, left, index)
                else:
                    selector.unregister(sock)
    selector.close()


def threaded(socks: Sequence[socket.socket], out: list[memoryview], into: list[memoryview]) -> None:
    """A thread per stream for what comes in; what goes out, too."""
    for sock in socks:
        sock.setblocking(True)
    threads = [threading.Thread(target=sock.sendall, args=(view,)) for sock, view in zip(socks, out, strict=True)]
    threads += [threading.Thread(target=_fill, args=pair) for pair in zip(socks, into, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)


def _fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


WAYS: dict[str, Callable[[Sequence[socket.socket], list[memoryview], list[memoryview]], None]] = {
    "polled": polled,
    "threads": threaded,
}


def _slices(tensor: torch.Tensor, count: int) -> list[memoryview]:
    view = memoryview(tensor.numpy())
    size_bytes = len(view) // count
    return [view[index * size_bytes : (index + 1) * size_bytes] for index in range(count)]


def _live(rank: int, pairs: Sequence[tuple[socket.socket, socket.socket]], meet: Barrier, told: Any) -> None:
    torch.set_num_threads(1)
    ends = [pair[rank] for pair in pairs]

    def case(way: str, streams: int, size_bytes: int) -> float:
        own, got = (torch.full((size_bytes,), value, dtype=torch.uint8) for value in (rank, 255))
        repeats = max(1, BYTES_PER_CASE // size_bytes // 16)
        meet.wait(_WAIT_S)
        before_s = time.perf_counter()
        for _ in range(repeats):
            WAYS[way](ends[:streams], _slices(own, streams), _slices(got, streams))
        used_s = (time.perf_counter() - before_s) / repeats
        if not bool((got == 1 - rank).all()):
            raise RuntimeError("what came is not what was sent")
        return used_s

    cases = {
        f"{way}_{streams}_{size_bytes >> 10}_KiB": lambda way=way, streams=streams, size_bytes=size_bytes: case(
            way, streams, size_bytes
        )
        for way in WAYS
        for streams in STREAMS
        for size_bytes in SIZES
    }
    interleave(cases, rounds=1)  # buffers grow to their sizes
    told.put(interleave(cases, rounds=ROUNDS))


def _connected(count: int) -> list[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(count)]
    for sock in (end for pair in pairs for end in pair):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return pairs


def measured() -> dict[str, float]:
    """Gigabytes per second and direction, medians over rounds; and how many times one polled stream that is."""
    fork = multiprocessing.get_context("fork")
    pairs, meet, told = _connected(max(STREAMS)), fork.Barrier(2), fork.Queue()
    members = [fork.Process(target=_live, args=(rank, pairs, meet, told), daemon=True) for rank in range(2)]
    for member in members:
        member.start()
    found: list[dict[str, list[float]]] = [told.get(timeout=10 * _WAIT_S) for _ in members]
    for member in members:
        member.join(_WAIT_S)
    seconds = {key: [max(pair) for pair in zip(*(each[key] for each in found), strict=True)] for key in found[0]}
    figures: dict[str, float] = {}
    for key, samples in seconds.items():
        way, streams, size_kib, _ = key.split("_")
        one = seconds[f"polled_1_{size_kib}_KiB"]
        figures[f"{key}_GB_per_s"] = (int(size_kib) << 10) / quantile(samples, 0.5) / 1e9
        if (way, streams) != ("polled", "1"):
            ratios = [base / sample for base, sample in zip(one, samples, strict=True)]
            figures[f"gain_{key}"] = quantile(ratios, 0.5)
    return figures


if __name__ == "__main__":
    measure_and_print(
        "comm_streams", measured, description=__doc__, settings={"streams": STREAMS, "sizes": SIZES, "rounds": ROUNDS}
    )
