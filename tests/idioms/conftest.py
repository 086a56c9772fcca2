"""One world of real processes for all idioms: every file's checks, started once."""

from __future__ import annotations

import pytest
from gloo_world import run_world

WORLD = 3


@pytest.fixture(scope="session")
def outcomes(request):
    modules = dict.fromkeys(item.module for item in request.session.items)
    checks = {}
    for module in modules:
        checks |= getattr(module, "IDIOMS", {})
    return run_world(WORLD, checks)
