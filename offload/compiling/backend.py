"""`torch.compile(model, backend="elastrain")`: programs of inductor whose saved values can leave for `save_on_disk`.

Outside of `save_on_disk`, such a program keeps its saved values in memory, as with any other backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from elastrain.offload import compiled_runs
from elastrain.offload.activations import operators
from elastrain.offload.compiling import graphs
from elastrain.offload.errors import OffloadConfigError

Program = Callable[..., Any]
INDUCTOR, AOT_EAGER = "inductor", "aot_eager"


def elastrain(
    model: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Program:
    """Compile one graph. `options` are those of inductor, and two of this backend.

    `options["backend"]` names the compiler that generates code: "inductor" (default) or "aot_eager". Values smaller
    than `options["min_bytes"]` stay in memory. Raises OffloadConfigError for CUDA graphs or an unknown compiler.
    """
    wanted = dict(options or {})
    below, partition = wanted.pop("backend", INDUCTOR), SavedLeave(wanted.pop("min_bytes", graphs.MIN_BYTES))
    compilers = {INDUCTOR: _compile_inductor, AOT_EAGER: _compile_eager}
    if below not in compilers:
        raise OffloadConfigError(f"options['backend'] is {below!r}: expected one of {sorted(compilers)}")
    compiled = compilers[below](model, inputs, partition, mode, wanted)
    compiled_runs.made_program()

    def run(*arguments: Any) -> Any:
        with compiled_runs.program():
            return compiled(*arguments)

    return run


class SavedLeave(CustomPartitionerFn):
    """The partitioner for both compilers.

    It cuts the graph, then inserts operators that spill values of `min_bytes` or more.
    """

    def __init__(self, min_bytes: int) -> None:
        self._min_bytes = min_bytes

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph into forward and backward, and let saved values leave.

        Warns about values of varying size.
        """
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        found = graphs.let_leave(forward, backward, kwargs["num_fwd_outputs"], self._min_bytes)
        if found.varying:
            warnings.warn(
                f"{found.varying} saved values stay in memory, since their sizes vary from call to call: compile "
                f"with dynamic=False, so that they can leave",
                stacklevel=2,
            )
        return forward, backward

    def uuid(self) -> Any:
        """Return the key under which compiled programs are cached on disk."""
        return get_hash_for_files((graphs.__file__, operators.__file__, __file__)), self._min_bytes


def _compile_inductor(
    model: fx.GraphModule, inputs: Sequence[Any], partition: SavedLeave, mode: str | None, options: dict[str, Any]
) -> Program:
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    chosen = {**(list_mode_options(mode) if mode else {}), **options}
    if chosen.get("triton.cudagraphs", config.triton.cudagraphs):
        raise OffloadConfigError(
            'backend="elastrain" cannot be used with CUDA graphs (mode="reduce-overhead", "max-autotune"): a graph '
            'replays fixed addresses, and what it saved has left them; use mode="max-autotune-no-cudagraphs"'
        )
    # Buffers are freed and never reused, because a drive may still be writing or reading one.
    patches = {**chosen, "custom_partitioner_fn": partition, "allow_buffer_reuse": False, "inplace_buffers": False}
    return cast(Program, compile_fx(model, inputs, config_patches=patches))


def _compile_eager(
    model: fx.GraphModule, inputs: Sequence[Any], partition: SavedLeave, mode: str | None, options: dict[str, Any]
) -> Program:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    if mode or options:
        raise OffloadConfigError(f"aot_eager has no mode and no options: got mode={mode!r} and {sorted(options)}")
    compiler: Any = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return cast(Program, compiler(model, inputs))
