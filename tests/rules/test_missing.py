"""Strategies that execution proves right and no row has, but for those left out on purpose."""

import os

import pytest
from guesses import InChild
from left_out import LEFT_OUT
from rule_proof import missing

from mixmesh.lang.rules import RULES
from tests.support.rule_samples import SAMPLES

missing_of = InChild(lambda op: missing(op, SAMPLES[op]))


@pytest.mark.parametrize("op", RULES)
def test_no_missing_strategy(op):
    found = missing_of(op)
    allowed = {line for lines in LEFT_OUT.values() for line in lines.get(op, ())}
    lacking = [line for line in found if line not in allowed]
    assert not lacking, f"{op} lacks\n" + "\n".join(lacking)
    stale = allowed.difference(found)
    assert not stale, f"{op}: left out, but not right either (or in the row by now)\n" + "\n".join(stale)


def test_a_process_that_ends_is_followed_by_another():
    end = InChild(lambda op: os._exit(1) if op == "bad" else 1 // len(op))
    with pytest.raises(AssertionError, match="ended its process"):
        end("bad")
    assert end("a") == 1
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        end("")
    assert end("a") == 1
