"""Private names of torch that the device needs; a name that this version of torch lacks raises an error at import."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch.utils import _python_dispatch, backend_registration


def _private(path: str, root: Any = torch._C) -> Any:
    """Return the attribute at a dotted path; a missing one raises, because nothing here may be skipped in silence."""
    try:
        return functools.reduce(getattr, path.split("."), root)
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__} has no {path}, without which `late` cannot work") from error


CPU_KEYS = _private("DispatchKeySet")(_private("DispatchKey.CPU"))
AUTOCAST_KEYS = _private("DispatchKeySet")(_private("DispatchKey.AutocastPrivateUse1"))
AUTOCAST_CPU_KEYS = _private("DispatchKeySet")(_private("DispatchKey.AutocastCPU"))
without_keys = _private("_ExcludeDispatchKeyGuard")

HooksBase = _private("_acc.PrivateUse1Hooks")
GuardBase = _private("_acc.DeviceGuard")
PRIVATE_USE = _private("_autograd.DeviceType.PrivateUse1")
set_up_backend = _private("_setup_privateuseone_for_python_backend", backend_registration)


all_operators = _private("_dispatch_get_all_op_names")
has_kernel = _private("_dispatch_has_kernel_for_dispatch_key")
takes_numbers = _private("_should_allow_numbers_as_tensors")
fused_attention = _private("_fused_sdp_choice", torch)
without_modes = _private("_disable_current_modes", _python_dispatch)

run_backward = _private("_engine_run_backward", torch.autograd)
stash_in_thread = _private("_stash_obj_in_tls")
stashed_in_thread = _private("_get_obj_in_tls")
is_stashed_in_thread = _private("_is_key_in_tls")
"""Objects that autograd's threads take over from the thread that called `backward`."""


_library: Any = torch.library
_of_aten, _of_all = _library.Library("aten", "IMPL"), _library.Library("_", "IMPL")
register = _of_aten.impl
"""`register(operator, kernel, key)`, for an operator of aten."""
register_for_all = _of_all.fallback
fall_through = _library.fallthrough_kernel


def traced_as(operator: Any, key: str) -> None:
    """Let torch's compiler trace an operator under a key as it traces it on the CPU: dropout rounds otherwise."""
    kernels = _private("py_kernels", operator)
    keys = _private("DispatchKey")
    operator.py_impl(_private(key, keys))(kernels[keys.CompositeImplicitAutograd])


def overload(name: str) -> Any:
    """Return the operator of a dispatcher's name, such as `aten::add.Tensor`."""
    plain, _, kind = name.removeprefix("aten::").partition(".")
    return getattr(_private(plain, torch.ops.aten), kind or "default")


@functools.cache
def elementwise() -> frozenset[str]:
    """Return the operators whose CUDA kernels take a 0-dim tensor on the CPU as an argument, as torch declares them."""
    declared = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = declared.read_text().split("\n- func: ")[1:]
    marked = re.compile(r"device_check: NoCheck +# TensorIterator|structured_inherits: TensorIteratorBase")
    return frozenset("aten::" + entry.partition("(")[0] for entry in entries if marked.search(entry))
