"""A genuine device of torch: its names, its views and storages, and what it counts."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import late


def test_torch_knows_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("late")
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    assert torch.get_device_module("late") is torch.late  # type: ignore[attr-defined]
    assert torch.ones(2, device="late").device == torch.device("late", 0)
    assert torch.late.is_initialized()  # type: ignore[attr-defined]
    assert isinstance(torch.late.Stream(), torch.Stream)  # type: ignore[attr-defined]


def test_views_share_storage_and_versions() -> None:
    values = torch.arange(12.0, device="late").view(3, 4)
    views = [values.t(), values[1:, ::2], values.flatten(), values.unfold(1, 2, 1), values.view(torch.int32)]
    views += [
        values.expand(2, 3, 4),
        values.split(2)[0],
        values.diagonal(),
        torch.view_as_complex(values.view(3, 2, 2)),
    ]
    assert {view.untyped_storage().data_ptr() for view in views} == {values.data_ptr()}
    values[1, 0] = 70
    assert views[0][0, 1].item() == views[1][0, 0].item() == views[2][4].item() == 70
    assert values._version == views[1]._version == 1 and views[1]._is_view()


def test_parameters_take_other_memory() -> None:
    layer, flat = nn.Linear(3, 2).to("late"), torch.zeros(6, device="late")
    layer.weight.data = flat.view(2, 3)
    flat.fill_(2)
    assert layer.weight.sum().item() == 12 and layer.weight.is_leaf
    grad = torch.zeros(6, device="late")
    layer.weight.grad = grad.view(2, 3)
    layer(torch.ones(1, 3, device="late")).sum().backward()
    assert grad.tolist() == [1] * 6, "gradients are added where they lie"
    layer.weight.requires_grad_(False).set_(torch.ones(2, 3, device="late"))
    assert layer.weight.sum().item() == 6


def test_memory_that_nobody_has_written_is_wrong() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.empty(9, dtype=dtype, device="late").isnan().all()
    assert torch.empty_strided((2, 2), (1, 2), device="late").isnan().all()


def test_a_result_that_is_given_grows() -> None:
    out = torch.empty(0, device="late")
    torch.mul(torch.ones(3, device="late"), 2, out=out)
    assert out.tolist() == [2] * 3
    out.resize_(2)
    assert out.tolist() == [2] * 2
    assert out.resize_(5)[:2].tolist() == [2] * 2


def test_tensors_are_saved_loaded_and_copied() -> None:
    model = nn.Linear(3, 2).to("late")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where in ("cpu", "late"):
        file.seek(0)
        loaded = torch.load(file, map_location=where, weights_only=True)
        assert loaded["weight"].device.type == where and torch.equal(loaded["weight"].cpu(), model.weight.cpu())
    assert torch.equal(copy.deepcopy(model).weight.cpu(), model.weight.cpu())


def test_fakes_lie_on_the_device() -> None:
    with FakeTensorMode() as mode:
        layer = nn.Sequential(nn.Linear(4, 4, device="late"), nn.Dropout(0.5))
        made = nn.functional.scaled_dot_product_attention(
            *[layer(torch.ones(2, 4, device="late")).view(1, 1, 2, 4)] * 3
        )
        assert made.device.type == "late" and mode.from_tensor(torch.ones(2, device="late")).device.type == "late"


def test_a_dispatch_mode_sees_each_operator_once() -> None:
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    values = torch.ones(2, 2, device="late")
    with Seeing():
        (values @ values).softmax(0)
    assert seen == ["aten.mm.default", "aten._softmax.default"]


def test_copies_kernels_and_waits_are_counted_by_thread() -> None:
    def work() -> None:
        values = torch.empty(8, device="late").copy_(torch.ones(8), non_blocking=True)
        values += 1
        values.clone()
        host = torch.empty(8).copy_(values, non_blocking=True)
        torch.late.current_stream().synchronize()  # type: ignore[attr-defined]
        host[:2].copy_(values[:2])
        values.sum().item()

    before = late.stats()
    thread = threading.Thread(target=work, name="counted")
    thread.start()
    thread.join()
    counted = late.stats("counted")
    assert {name: counted[name] for name in counted if name != "kernels"} == {
        "copies_in": 1,
        "bytes_in": 32,
        "copies_out": 2,
        "bytes_out": 40,
        "copies_within": 1,
        "waits": 3,
    }
    assert counted["kernels"] == 4 and late.stats() - before == counted


@pytest.mark.parametrize("how", ["nonzero", "equal", "mask", "unique"])
def test_what_needs_values_waits(how: str) -> None:
    values = torch.ones(4, device="late")
    mask = values > 0
    waits = late.stats()["waits"]
    {
        "nonzero": values.nonzero,
        "equal": lambda: torch.equal(values, values),
        "mask": lambda: values[mask],
        "unique": values.unique,
    }[how]()
    assert late.stats()["waits"] == waits + 1


def test_a_storage_that_is_resized_loses_its_bytes_and_gets_new_ones_under_all_views() -> None:
    memory = torch.get_device_module("late")
    values = torch.ones(1000, device="late")
    view, storage, held = values[5:], values.untyped_storage(), memory.memory_allocated()
    storage.resize_(0)
    assert storage.nbytes() == 0 and memory.memory_allocated() == held - 4096
    with pytest.raises(RuntimeError, match="illegal access to memory of late that resize_ has freed"):
        view.sum()
    storage.resize_(4000)
    assert storage.nbytes() == 4000 and memory.memory_allocated() == held and view.isnan().all()
    view.fill_(3)
    assert values[5:].sum() == 3 * 995
    with pytest.raises(RuntimeError, match="late resizes a storage of 4000 bytes to 0, and not to 8000"):
        storage.resize_(8000)


def test_a_storage_is_resized_in_the_order_of_the_current_stream() -> None:
    values, side = torch.ones(1000, device="late"), torch.get_device_module("late").Stream()
    side.wait_stream(torch.get_device_module("late").current_stream())
    with torch.get_device_module("late").stream(side):
        values.add_(1)
    with pytest.raises(late.RaceError, match="resize_ on stream 0 writes memory that aten::add_"):
        values.untyped_storage().resize_(0)
    late.races(forget=True)


def test_a_graph_computes_again_on_the_same_memory_and_refuses_what_waits() -> None:
    given = torch.full((4,), 2.0, device="late")
    graph = torch.late.CUDAGraph()
    with torch.late.graph(graph):
        assert torch.late.is_current_stream_capturing()
        made = given * 3
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            made.cpu()
    assert not torch.late.is_current_stream_capturing()
    given.fill_(5.0)
    graph.replay()
    assert made.cpu().tolist() == [15.0] * 4
