"""How many cases a fuzzer tries: a few in every run of the tests, many with `-m long`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
FEW, MANY = 15, int(os.environ.get("S3D_FUZZ_CASES", "10000"))
