"""Choices of torch's compiler that decide bits: how members make the same ones, and what they compare of them.

Inductor and its templates choose among kernels by the time that each takes, and the choices of two processes differ.
Its deterministic mode chooses by rule wherever results could differ. Nothing here imports the compiler.
"""

from __future__ import annotations

import sys
from typing import Any

from elastrain.base.environment import compiler_variables, set_compiler_default
from elastrain.errors import ConfigError
from elastrain.runtime.model.kernels import import_compiler_late

DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"
NAMES = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "max_autotune_gemm_backends",
    "coordinate_descent_tuning",
    "batch_invariant",
    "fallback_random",
    "emulate_precision_casts",
    "emulate_divison_rounding",
    "split_reductions",
    "epilogue_fusion",
    "pattern_matcher",
    "freezing",
    "cpp.simdlen",
    "cpp.enable_floating_point_contract_flag",
    "triton.cudagraphs",
    "triton.persistent_reductions",
    "triton.cooperative_reductions",
    "triton.multi_kernel",
)
"""Names in `torch._inductor.config` of settings that members compare."""


def settle(*, deterministic: bool) -> None:
    """Make the compiler choose kernels by rule if `deterministic`, and optimizers do without an import of it."""
    import_compiler_late()
    if not deterministic:
        return
    set_compiler_default(DETERMINISTIC, "1")
    config = _config()
    if config is not None and DETERMINISTIC in compiler_variables() and not _is_refused_by_user():
        config.deterministic = True  # it was imported before the variable was set


def described() -> dict[str, Any]:
    """Return the choices that members compare, if they compute deterministically.

    Raises ConfigError if the script has turned off the deterministic mode and uses the compiler.
    """
    config = _config()
    if config is not None and not getattr(config, "deterministic", True):
        raise ConfigError(
            "inductor's deterministic mode is off, so torch.compile chooses kernels by the time that they take, and "
            f"members compute other bits: leave {DETERMINISTIC} and torch._inductor.config.deterministic as they are, "
            "or use elastrain.init(deterministic=False)"
        )
    changed = {name: str(_value(config, name)) for name in NAMES if config is not None and _is_changed(config, name)}
    told = {name: value for name, value in compiler_variables().items() if (name, value) != (DETERMINISTIC, "1")}
    return {f"inductor {name}": value for name, value in (told | changed).items()}


def _config() -> Any:
    """Return inductor's settings, or None if nothing has imported them: then all have their defaults."""
    return sys.modules.get("torch._inductor.config")


def _is_refused_by_user() -> bool:
    return compiler_variables().get(DETERMINISTIC) != "1"


def _is_changed(config: Any, name: str) -> bool:
    """Return True if the script has changed a setting that this version of torch has."""
    try:
        return not config._is_default(name)
    except (KeyError, AttributeError):
        return False


def _value(config: Any, name: str) -> object:
    value = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
