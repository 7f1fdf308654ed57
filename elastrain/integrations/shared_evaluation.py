"""Evaluation loops of a library, which every member runs for all batches while each computes some of the forwards.

`ReadAhead` reads some batches of a loader ahead. The members compute their outputs together by `job.predict`, and each
member's loop finds them in place of its own. So all that the loop does with them, in metrics and sums, has the bits
of one process. `SharedForwards` shares the first call of a module in each batch. The first batch is a trial, which
every member computes: only a forward that takes the batch's tensors as they are, changes nothing, draws no random
number and returns plain data is shared. `shared_predictions` shares the steps of a `transformers.Trainer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elastrain.base.processes import say
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.runtime.job import Job

_SIZES, _CHUNK = (1, 8), 32
"""Batches that are read at a time: the trial, a few, because loops may end early, and as many as a loop may keep."""
_KEPT_CHUNKS = 3
"""Libraries read a batch or two ahead themselves."""
_OUTPUT_BYTES_MAX = 4 << 20
"""Most bytes of the outputs of a batch. Computing a forward again is faster than to send more."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(eq=False)
class Chunk:
    """Batches that were read together, and the outputs of those that were computed."""

    batches: Sequence[Any]
    is_trial: bool
    tensors: list[list[Tensor]] = field(init=False)
    outputs: dict[int, Any] = field(default_factory=dict)
    is_computed: bool = False

    def __post_init__(self) -> None:
        self.tensors = [list(_tensors(batch)) for batch in self.batches]


class BatchTensor(NamedTuple):
    """The place of a tensor in a batch that was read."""

    chunk: Chunk
    batch: int
    tensor: int


class ReadAhead:
    """A loader that reads some batches ahead, and knows where their tensors belong.

    Args:
        loader: Loader of the script.
        limit: Function that returns the most batches that are read, or None.
        on_device: Function that moves a batch to the device.
    """

    def __init__(
        self,
        loader: Any,
        limit: Callable[[], int | None] = lambda: None,
        on_device: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self._loader, self._limit, self._on_device = loader, limit, on_device
        self._chunks: deque[Chunk] = deque(maxlen=_KEPT_CHUNKS)
        self.trial: Trial | None = None
        """The forward of the first batch, once it was computed."""
        self.is_shared: bool | None = None
        """True if the members have agreed to share; None: they were not asked."""

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.trial = self.is_shared = None
        self._chunks.clear()
        batches = map(self._on_device, islice(self._loader, self._limit()))
        for size in chain(_SIZES, repeat(_CHUNK)):
            read = list(islice(batches, size))
            if not read:
                return
            self._chunks.append(Chunk(read, is_trial=size == 1))
            yield from read

    def chunk_of(self, batch: Any) -> tuple[Chunk, int] | None:
        """Return where a batch is, or None if it is none of those that were read last."""
        found = ((each, at) for each in self._chunks for at, one in enumerate(each.batches) if one is batch)
        return next(found, None)

    def place(self, tensor: Tensor) -> BatchTensor | None:
        """Return where a tensor belongs, or None if it is none of the batches that were read last."""
        for chunk in self._chunks:
            for batch, tensors in enumerate(chunk.tensors):
                for number, one in enumerate(tensors):
                    if one is tensor:
                        return BatchTensor(chunk, batch, number)
        return None


class Call(NamedTuple):
    """A call of a module with tensors of one batch."""

    chunk: Chunk
    batch: int
    arguments: Sequence[Any]
    """For each leaf, the number of a tensor of the batch, as a tuple of one; or a plain value."""
    spec: TreeSpec
    module: int

    def is_like(self, other: Call) -> bool:
        """Return True if the other call is the same one with the tensors of another batch."""
        ours, theirs = ((call.module, call.spec, repr(call.arguments)) for call in (self, other))
        return ours == theirs

    def arguments_for(self, chunk: Chunk, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of this call with the tensors of another batch."""
        tensors = chunk.tensors[batch]
        leaves = [tensors[each[0]] if isinstance(each, tuple) else each for each in self.arguments]
        return tree_unflatten(leaves, self.spec)  # type: ignore[no-any-return]


class Trial(NamedTuple):
    """The first forward of a loop, and why it cannot be shared, or ""."""

    call: Call
    output: TreeSpec
    problem: str


class SharedForwards:
    """The forwards of some modules in evaluation loops over some loaders, while it is entered.

    Args:
        job: The job whose members share.
        model: The model of the loops. The outermost call counts of it, or of a child of it that has parameters.
        loaders: Loaders whose batches the loops go through.
        is_between: Function that returns True between two steps, where members may compute together.
    """

    def __init__(
        self, job: Job, model: nn.Module | None, loaders: Sequence[ReadAhead], is_between: Callable[[], bool]
    ) -> None:
        self._job, self._loaders, self._is_between = job, loaders, is_between
        children = [] if model is None else [model, *model.children()]
        self._modules = [each for each in children if next(each.parameters(), None) is not None]
        self._is_inside = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the shared forwards in the place of the modules' own."""
        kept = [(module, vars(module).get("forward")) for module in self._modules]
        for number, module in enumerate(self._modules):
            forward = module.forward
            vars(module)["forward"] = update_wrapper(partial(self._forward, number, forward), forward)
        try:
            yield
        finally:
            for module, own in kept:
                if own is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = own

    def _forward(self, number: int, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or torch.is_grad_enabled() or self._modules[number].training or not self._is_between():
            return compute(*args, **kwargs)
        self._is_inside = True
        try:
            return self._outermost(number, compute, args, kwargs)
        finally:
            self._is_inside = False

    def _outermost(self, number: int, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for loader in self._loaders:
            call = _call(loader, number, args, kwargs)
            if call is None:
                continue
            if call.chunk.is_trial:
                if loader.trial is not None:
                    break
                loader.trial, output = _tried(call, self._modules[number], partial(compute, *args, **kwargs))
                return output
            if loader.trial is None or not loader.trial.call.is_like(call) or not self._agree(loader):
                break
            if not call.chunk.is_computed:
                self._compute(compute, loader.trial, call.chunk)
            # Once: a second forward of the batch may be meant to draw other random numbers.
            if (leaves := call.chunk.outputs.pop(call.batch, None)) is not None:
                return tree_unflatten(leaves, loader.trial.output)
            break
        return compute(*args, **kwargs)

    # A newcomer has tried a forward for the first time, which may have made a cache. So one member decides.
    def _agree(self, loader: ReadAhead) -> bool:
        if loader.is_shared is None:
            assert loader.trial is not None
            problem = self._job.broadcast(loader.trial.problem)
            loader.is_shared = not problem
            if problem and self._job.is_main:
                say(f"every member computes all batches of this evaluation, because {problem}")
        return loader.is_shared

    def _compute(self, compute: Callable[..., Any], trial: Trial, chunk: Chunk) -> None:
        def leaves_of(batch: int) -> Any:
            args, kwargs = trial.call.arguments_for(chunk, batch)
            leaves, spec = tree_flatten(compute(*args, **kwargs))
            return leaves if spec == trial.output and not _unfit(leaves) else None

        chunk.is_computed = True
        found = self._job.predict(leaves_of, range(len(chunk.batches)), batch_size=1, collate_fn=_only)
        chunk.outputs.update(enumerate(found))


@contextmanager
def shared_forwards(job: Job, model: nn.Module, loader: Any, is_between: Callable[[], bool]) -> Iterator[ReadAhead]:
    """Share the forwards of a model in a loop over the loader, and yield the loader for that loop."""
    ahead = ReadAhead(loader)
    with SharedForwards(job, model, [ahead], is_between).entered():
        yield ahead


@contextmanager
def shared_predictions(trainer: Any, loader: Any) -> Iterator[ReadAhead]:
    """Let the evaluation loop of a trainer find the predictions that the members compute together.

    Yields the loader for that loop. Logits are preprocessed for metrics by the member that computes them.
    """
    ahead, own, preprocess = ReadAhead(loader), trainer.prediction_step, trainer.preprocess_logits_for_metrics

    def predict(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = own(model, inputs, *args, **kwargs)
        if logits is not None and preprocess is not None:
            logits = preprocess(logits, labels)
        return loss, logits, labels

    def found(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        place = ahead.chunk_of(inputs)
        assert place is not None
        chunk, at = place
        if not chunk.is_computed:
            fn = lambda batch: predict(model, chunk.batches[batch], *args, **kwargs)  # noqa: E731
            told = trainer.job.predict(fn, range(len(chunk.batches)), batch_size=1, collate_fn=_only)
            chunk.is_computed = True
            chunk.outputs.update(enumerate(told))
        return chunk.outputs.pop(at)

    trainer.prediction_step = found
    trainer.preprocess_logits_for_metrics = None
    try:
        yield ahead
    finally:
        del vars(trainer)["prediction_step"]
        trainer.preprocess_logits_for_metrics = preprocess


def _only(given: list[Any]) -> Any:
    (found,) = given
    return found


def _tensors(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch, in a fixed order."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for each in thing.values():
            yield from _tensors(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _tensors(each)


def _call(loader: ReadAhead, module: int, args: Any, kwargs: Any) -> Call | None:
    """Return the call, or None if it takes anything else than tensors of one batch and plain values."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [loader.place(each) if isinstance(each, Tensor) else each for each in leaves]
    found = [each for each in places if isinstance(each, BatchTensor)]
    if not found or any(each.chunk is not found[0].chunk or each.batch != found[0].batch for each in found):
        return None
    if not all(isinstance(each, BatchTensor) or type(each) in _PLAIN for each in places):
        return None
    if any(
        isinstance(leaf, Tensor) and not isinstance(at, BatchTensor) for leaf, at in zip(leaves, places, strict=True)
    ):
        return None
    arguments = [(each.tensor,) if isinstance(each, BatchTensor) else each for each in places]
    return Call(found[0].chunk, found[0].batch, arguments, spec, module)


def _tried(call: Call, module: nn.Module, compute: Callable[[], Any]) -> tuple[Trial, Any]:
    """Compute a forward, and find out whether it may be shared."""
    before = _fingerprint(module), torch.get_rng_state()
    output = compute()
    leaves, spec = tree_flatten(output)
    problem = _unfit(leaves)
    if not torch.equal(before[1], torch.get_rng_state()):
        problem = "its forward draws random numbers"
    elif before[0] != _fingerprint(module):
        problem = "its forward changes the model's attributes"
    elif any(_is_watched(each) for each in module.modules() if each is not module):
        problem = "hooks watch the modules inside of the model"
    return Trial(call, spec, problem), output


def _is_watched(module: nn.Module) -> bool:
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return not all(isinstance(each, OriginalsHook) for each in hooks)


def _unfit(leaves: Sequence[Any]) -> str:
    """Return why these outputs cannot be sent, or ""."""
    for leaf in leaves:
        is_dense = type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_quantized
        if not is_dense and type(leaf) not in _PLAIN:
            return f"its forward returns a {type(leaf).__name__}"
    size_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return f"its forward returns {size_bytes} bytes for a batch" if size_bytes > _OUTPUT_BYTES_MAX else ""


def _fingerprint(module: nn.Module) -> list[Any]:
    """Return what tells that a forward has changed the module: its attributes, sizes of containers, and buffers."""
    return [(name, _mark(value)) for each in module.modules() for name, value in vars(each).items()] + [
        _mark(buffer) for buffer in module.buffers()
    ]


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | dict | set | deque):
        return id(value), len(value)
    return id(value)
