"""Loss scaling for float16: the rule, which is part of the job, and its state, which is in every commit record.

Values only; other modules multiply and divide by the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastrain.errors import ConfigError

LEAST_SCALE = 2.0**-24
"""Lower bound of the scale: a model that yields only NaN must not bring it to zero."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A rule for scaling losses: it begins with `initial` and then follows torch.amp.GradScaler.

    A step that overflows multiplies the scale by `backoff_factor`. After `growth_interval` steps in a row without
    overflow it is multiplied by `growth_factor`. An interval of 0 keeps it fixed. Raises ConfigError on bad values.
    """

    # torch's own defaults, so that a script that used GradScaler before trains the same way.
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
        """Scaling of the first step."""
        return Scaler(scale=float(self.initial))


# In every commit record, so that newcomers and survivors scale the next step alike.
@dataclass(frozen=True, kw_only=True)
class Scaler:
    """State of the loss scaling in one step."""

    scale: float = 1.0
    clean_steps: int = 0
    """Steps without overflow since the scale last changed."""


UNSCALED = LossScale(initial=1.0, growth_interval=0)
NO_SCALE = UNSCALED.start


def rule_of(setting: object) -> LossScale:
    """Return the rule for a user's setting. Raises ConfigError for any other value.

    The setting is None (no scaling), a number (fixed scale), "dynamic", or a rule.
    """
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
    """Return the scaling of the next step by torch's rule (`_amp_update_scale_`), the same on every member."""
    # With a fixed scale, an overflow skips the step, and the scale stays.
    if rule.growth_interval == 0:
        return scaler
    # The count starts again, because growth needs clean steps in a row.
    if overflow:
        return Scaler(scale=max(LEAST_SCALE, scaler.scale * rule.backoff_factor))
    if scaler.clean_steps + 1 < rule.growth_interval:
        return Scaler(scale=scaler.scale, clean_steps=scaler.clean_steps + 1)
    # A scale that would become infinite stays as it is, as in torch.
    grown = scaler.scale * rule.growth_factor
    return Scaler(scale=grown if math.isfinite(grown) else scaler.scale)
