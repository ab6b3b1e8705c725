"""Settings of property tests: the same examples every time where CI is set, fresh ones elsewhere."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A failing example is printed as a blob that @reproduce_failure takes. No deadline: machines are shared.
settings.register_profile("local", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
