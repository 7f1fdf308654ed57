"""Settings for every test: the profile of the property tests, and whole lines on standard error."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples in every run: a failure is a fault of the code, never of the day. No deadline: machines are shared.
settings.register_profile(
    "house", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")

# Unbuffered, Python writes a line of standard error in pieces, and what other processes write comes between.
os.environ.pop("PYTHONUNBUFFERED", None)
