"""Settings for every test: the profile of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run: a failure is a fault of the code, never of the day. No deadline: machines are shared.
settings.register_profile(
    "house", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")
