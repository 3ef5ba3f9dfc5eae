"""Settings for all tests: no time limit for an example, because machines are shared and noisy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("dart", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dart")
