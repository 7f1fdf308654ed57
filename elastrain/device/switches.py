"""Switches by which torch chooses an accelerator's kernels, and with them the bits of their results."""

from __future__ import annotations

from typing import Any

import torch

NAMES = (
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "backends.cuda.preferred_blas_library",
    "backends.cuda.preferred_linalg_library",
    "backends.cuda.preferred_rocm_fa_library",
    "backends.cudnn.enabled",
    "backends.cudnn.deterministic",
    "backends.cudnn.benchmark",
    "is_deterministic_algorithms_warn_only_enabled",
)
"""Names in `torch`. Precisions of float32 have their newer names (TF32 is one of them): torch answers for these
whichever names a script has set, and raises for the older ones where a script uses both."""

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "DISABLE_ADDMM_CUDA_LT",
)
"""Environment variables that the libraries of a device read."""


def switches() -> dict[str, str]:
    """Return the present values by name. A switch that this version of torch lacks has the value `None`."""
    return {f"torch.{name}": str(_value(name)) for name in NAMES}


def _value(name: str) -> object:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
    return value() if callable(value) else value
