"""Four kinds of data that are read in order: of `datasets`, `webdataset`, MosaicML's `streaming`, and a generator.

Each has `SAMPLES` numbered samples in eight shards. What a library writes goes to a folder, once.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

SAMPLES, SHARDS = 160, 8
SOURCES = ("generator", "datasets", "webdataset", "streaming")


def missing(kind: str) -> str:
    """Return why a kind of data cannot be read here, or ""."""
    try:
        importlib.import_module("torchdata" if kind == "generator" else kind)
    except Exception as error:  # noqa: BLE001 - a library that lacks one of its own raises anything
        return f"{kind} cannot be imported ({error})"
    return ""


def sample(number: int) -> dict[str, Any]:
    return {"number": number, "x": [float((number * k) % 11) for k in range(1, 5)]}


class Generated(IterableDataset[Any]):
    """A generator without a state. It draws, shuffles in a buffer of its own, and shares out as torch's loaders do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info, buffer = get_worker_info(), []
        assert info is not None
        order = random.Random(random.getrandbits(30))
        for number in range(info.id, SAMPLES, info.num_workers):
            buffer.append({**sample(number), "draw": torch.rand(()).item()})
            if len(buffer) > 8:
                yield buffer.pop(order.randrange(len(buffer)))
        yield from buffer


def _of_shards(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(shard, SAMPLES, SHARDS):
            yield sample(number)


def of_datasets() -> Any:
    import datasets

    found = datasets.IterableDataset.from_generator(_of_shards, gen_kwargs={"shards": list(range(SHARDS))})
    return found.shuffle(seed=3, buffer_size=12)


def of_webdataset(folder: Path) -> Any:
    import webdataset

    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in _of_shards([shard]):
                content = json.dumps(row).encode()
                entry = tarfile.TarInfo(f"{row['number']:06d}.json")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    urls = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    found = webdataset.WebDataset(urls, shardshuffle=False).decode().map(lambda row: row["json"])
    return found.compose(webdataset.detshuffle(bufsize=10, seed=5))


class OfMosaic(IterableDataset[Any]):
    """A `StreamingDataset` that is made where it is read, since its processes find each other by shared memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        return MosaicRows(self.folder)


class MosaicRows:
    """An iterator with the library's own state, which has to be told how many samples were taken."""

    def __init__(self, folder: Path) -> None:
        import streaming

        # The library looks for a free name in shared memory and takes it later: two processes may find the same one.
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.data = streaming.StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=7, batch_size=2)
        self.taken, self.rows = 0, None

    def __iter__(self) -> MosaicRows:
        return self

    def __next__(self) -> Any:
        self.rows = self.rows or iter(self.data)
        row = next(self.rows)
        self.taken += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        return self.data.state_dict(self.taken, True)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)
        self.taken = state["sample_in_epoch"]


def of_streaming(folder: Path, streams: int) -> Any:
    import streaming

    for stream in range(streams):
        if not (folder / f"{streams}-{stream}" / "index.json").exists():
            with streaming.MDSWriter(
                out=str(folder / f"{streams}-{stream}"), columns={"row": "json"}, size_limit=2000
            ) as out:
                for number in range(stream, SAMPLES, streams):
                    out.write({"row": sample(number)})
    return [OfMosaic(folder / f"{streams}-{stream}") for stream in range(streams)]


def source(kind: str, folder: Path, streams: int) -> Any:
    """Return the data of one kind."""
    folder = folder / kind
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "generator":
        return Generated()
    if kind == "datasets":
        return of_datasets()
    return of_webdataset(folder) if kind == "webdataset" else of_streaming(folder, streams)


def collate(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers and inputs. What a row drew is added to its inputs, so that other draws give other bits."""
    rows = [row.get("row", row) for row in rows]
    inputs = torch.tensor([[x + row.get("draw", 0.0) for x in row["x"]] for row in rows])
    return torch.tensor([int(row["number"]) for row in rows]), inputs
