"""The root package: what it offers, and that it stays cheap."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixmesh
from mixmesh import errors


@pytest.mark.parametrize("name", mixmesh.__all__)
def test_every_name_is_there(name):
    assert getattr(mixmesh, name) is not None


def test_the_names_of_the_design():
    wanted = {
        "Cluster",
        "Job",
        "Plan",
        "Program",
        "parse_program",
        "plan",
        "parallelize",
        "verify",
        "simulate",
    }
    assert wanted <= set(mixmesh.__all__)


def test_every_error_is_exported():
    tree = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.MixmeshError)}
    assert tree <= set(mixmesh.__all__)


def test_no_export_shares_its_name_with_a_module():
    # importing mixmesh.x binds mixmesh.x, and would hide an exported function x
    modules = {m.name for m in pkgutil.iter_modules(mixmesh.__path__)}
    assert not modules & set(mixmesh.__all__)


def test_functions_survive_the_import_of_every_module():
    for module in pkgutil.iter_modules(mixmesh.__path__):
        if module.name != "__main__":
            importlib.import_module(f"mixmesh.{module.name}")
    assert all(callable(getattr(mixmesh, n)) for n in ("plan", "verify", "simulate", "parallelize"))


def test_names_that_documents_and_errors_write_in_full():
    root = Path(__file__).parents[1]
    files = [*root.glob("docs/guide/*.md"), *root.glob("mixmesh/**/*.py")]
    called = {name for file in files for name in re.findall(r"\bmixmesh\.(\w+)\(", file.read_text())}
    assert {"prepare", "shard_batches", "full_optimizer_state_dict"} <= called
    assert all(hasattr(mixmesh, name) for name in called), called


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mixmesh.nothing  # noqa: B018


def test_importing_is_cheap():
    code = "import sys, mixmesh; mixmesh.Cluster; mixmesh.Plan; mixmesh.parse_program; mixmesh.PlanError;"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version():
    from importlib.metadata import version

    assert version("mixmesh") == mixmesh.__version__
