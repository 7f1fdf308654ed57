"""Loss scaling for float16: the rule, which is part of the job, and its state, which every commit record carries.

Values in, values out; who multiplies and divides is elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastrain.errors import ConfigError

LEAST_SCALE = 2.0**-24
"""A scale never falls below: a model that yields only NaN must not bring it to zero."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How losses are scaled: by `initial`, and from there as torch.amp.GradScaler does it.

    After a step that overflowed the scale is multiplied by `backoff_factor`; after `growth_interval` steps in a row
    that did not, by `growth_factor`. An interval of 0 keeps it fixed. Raises ConfigError on bad values.
    """

    # torch's own defaults, so that a script that comes from GradScaler trains as it did.
    initial: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and self.initial >= LEAST_SCALE):
            raise ConfigError(f"the loss scale must be a positive number from {LEAST_SCALE} on; got {self.initial}")
        if not (1.0 < self.growth_factor < math.inf and 0.0 < self.backoff_factor < 1.0):
            raise ConfigError(
                "a loss scale grows by a factor above 1 and backs off by one between 0 and 1; "
                f"got {self.growth_factor} and {self.backoff_factor}"
            )
        if isinstance(self.growth_interval, bool) or self.growth_interval < 0:
            raise ConfigError(
                f"the growth interval of the loss scale is a number of steps, or 0; got {self.growth_interval}"
            )

    @property
    def start(self) -> Scaler:
        return Scaler(scale=float(self.initial))


# In every commit record, so that newcomers and survivors scale the next step alike.
@dataclass(frozen=True, kw_only=True)
class Scaler:
    """Where the scaling stands in one step."""

    scale: float = 1.0
    clean_steps: int = 0
    """Steps without overflow since the scale last changed."""


UNSCALED = LossScale(initial=1.0, growth_interval=0)
NO_SCALE = UNSCALED.start


def rule_of(setting: object) -> LossScale:
    """Read a user's setting: None (no scaling), a number (fixed), "dynamic", or a rule. Raises ConfigError."""
    match setting:
        case None:
            return UNSCALED
        case "dynamic":
            return LossScale()
        case LossScale():
            return setting
        case float() | int() if not isinstance(setting, bool):
            return LossScale(initial=float(setting), growth_interval=0)
    raise ConfigError(f"loss_scale must be None, a number, 'dynamic' or an elastrain.LossScale; got {setting!r}")


def advance(rule: LossScale, scaler: Scaler, *, overflow: bool) -> Scaler:
    """Compute the scaling of the next step by torch's rule (`_amp_update_scale_`), the same on every member."""
    # A fixed scale: an overflow skips the step, and the scale stays what the user chose.
    if rule.growth_interval == 0:
        return scaler
    # The count begins anew, because growth needs clean steps in a row.
    if overflow:
        return Scaler(scale=max(LEAST_SCALE, scaler.scale * rule.backoff_factor))
    if scaler.clean_steps + 1 < rule.growth_interval:
        return Scaler(scale=scaler.scale, clean_steps=scaler.clean_steps + 1)
    # As torch does, a scale that would become infinite stays where it is.
    grown = scaler.scale * rule.growth_factor
    return Scaler(scale=grown if math.isfinite(grown) else scaler.scale)
