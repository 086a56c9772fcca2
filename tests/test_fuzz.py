"""The short forms of ``make fuzz``, with fixed seeds."""

from __future__ import annotations

import pytest
from fuzz import models


@pytest.mark.parametrize("case_seed", range(12))
def test_random_models(case_seed):
    report = models.replay(case_seed)
    assert not report.failures, "\n".join(f.what for f in report.failures)
