"""A world of real processes for the idioms of each file: its checks, started once."""

from __future__ import annotations

import pytest
from gloo_world import run_world

WORLD = 3


@pytest.fixture(scope="module")
def outcomes(request):
    """By check of a file's ``IDIOMS``, what each rank said. Each model keeps threads as long as its processes
    live, so one world for all files has thousands."""
    return run_world(WORLD, request.module.IDIOMS)
