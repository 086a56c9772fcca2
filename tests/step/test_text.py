"""The events of a step, program text -> step text, one file a case.

``--update-golden`` rewrites the steps; read the difference before committing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mixmesh.lang.check import check_program
from mixmesh.lang.ir import parse_program
from mixmesh.step import print_step

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_steps(path, request):
    text, _, expected = path.read_text().partition("\nstep ")
    program = parse_program(text)
    check_program(program)
    found = print_step(program) + "\n"
    if request.config.getoption("--update-golden"):
        path.write_text(f"{text}\n{found}")
        return
    assert found == f"step {expected}"
