"""Hypothesis profiles: "default", and "thorough" for nightly runs (HYPOTHESIS_PROFILE=thorough)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline: tests share slow machines, and the time of one example says nothing.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
