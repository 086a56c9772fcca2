"""Strategies that execution proves right and no row has, but for those left out on purpose."""

import os
import pickle
import traceback
from dataclasses import dataclass

import pytest
import torch
from left_out import LEFT_OUT
from rule_proof import missing

from mixmesh.lang.rules import RULES
from tests.support.rule_samples import SAMPLES


@pytest.mark.parametrize("op", RULES)
def test_no_missing_strategy(op):
    found = in_child(lambda: missing(op, SAMPLES[op]))
    allowed = {line for lines in LEFT_OUT.values() for line in lines.get(op, ())}
    lacking = [line for line in found if line not in allowed]
    assert not lacking, f"{op} lacks\n" + "\n".join(lacking)
    stale = allowed.difference(found)
    assert not stale, f"{op}: left out, but not right either (or in the row by now)\n" + "\n".join(stale)


def in_child(work):
    """The result of ``work``, or what it raises, from a forked process: guesses may end the process that
    makes them."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            torch.set_num_threads(1)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    assert data, "the search ended its process: is the operator one of rule_proof.UNCHECKED?"
    result = pickle.loads(data)
    if isinstance(result, Raised):
        raise AssertionError(result.text)
    return result


@dataclass(frozen=True)
class Raised:
    """The traceback of an error in a child."""

    text: str


def result_of(work):
    try:
        return work()
    except Exception:
        return Raised(traceback.format_exc())
