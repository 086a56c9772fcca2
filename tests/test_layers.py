"""The layers of the design, as a table: a module imports what stands above it here, and nothing else.

Modules of one row form one group and may import each other; groups of one layer may not.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from trl_folder import find_trl

import mixmesh

ROOT = Path(mixmesh.__file__).parent

# layer -> its groups, from the bottom up; a group is a set of modules, each with all that it holds
LAYERS: tuple[tuple[set[str], ...], ...] = (
    (
        {"errors"},
        {"base.lazy"},
        {"base.patch"},
        {"base.files", "base.callers", "base.progress"},
        {"base.units"},
        {"base.heap"},
        {"base.solver"},
        {"base.least_squares"},
        {"lang.operators"},
        {"lang.optimizer_states"},
    ),
    ({"lang.ir"}, {"base.timeline"}, {"base.run_log"}, {"base.launched"}, {"base.uncaught"}, {"cluster"}),
    ({"lang.rules"},),
    ({"lang.plan_file", "lang.plan_header", "lang.plan_devices"}, {"frontend.trace"}, {"frontend.job"}),
    ({"cost"},),
    ({"lang.check"}, {"step"}),
    ({"step.memory"},),
    (
        {"passes.buckets"},
        {"passes.order"},
        {"passes.algorithms"},
        {"passes.factors"},
        {"passes.recomputation", "passes.checkpointing"},
        {"passes.direct"},
        {"passes.sequence"},
        {"passes.zero"},
        {"search.ratios"},
        {"search.synthesis"},
        {"runtime"},
        {"measure.testbed"},
    ),
    ({"simulator"},),
    (
        {"search.baselines"},
        {"passes.sync"},
        {"measure.profiler"},
        {"measure.verification"},
        {"search.placement"},
    ),
    ({"search.evaluate"},),
    ({"search.learned"}, {"cluster.detection"}),
    ({"planner", "explain"},),
    ({"api"}, {"measure.tuning"}, {"measure.calibration"}),
    ({"training.rebalance"},),
    ({"training.preparation"}, {"explain.whatif"}),
    ({"checkpoint"},),
    (
        {"training.integrations", "hf", "accelerate", "lightning"},
        {"measure.doctor"},
        {"explain.report"},
    ),
    ({"cli", "__main__"},),
)
# packages that hold others and say no more than what these are
FOLDERS = {"base", "frontend", "lang", "measure", "passes", "search", "training"}
# the only ones that may import torch when they are imported
TORCH = {
    "lang.operators", "frontend.trace", "runtime", "measure.verification", "measure.profiler",
    "search.learned", "measure.tuning", "cluster.detection", "training", "checkpoint",
    "measure.calibration", "measure.doctor", "hf", "accelerate", "lightning",
}  # fmt: skip
TORCH_FILES = {
    "lang/check/types.py",
    *(f"frontend/job/workloads/{p.name}" for p in (ROOT / "frontend/job/workloads").glob("*.py")),
}

PLACE = {name: (n, m) for n, layer in enumerate(LAYERS) for m, group in enumerate(layer) for name in group}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def module_of(path: Path) -> str:
    """The name of a file's module within the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def place_of(module: str) -> str | None:
    """The row of ``LAYERS`` with a module of this name within the package, or with what holds it."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in PLACE), None)


def is_within(module: str, holders: set[str]) -> bool:
    return any(f"{module}.".startswith(f"{holder}.") for holder in holders)


def imports(path: Path, *, inside_functions: bool) -> list[tuple[str, int]]:
    """Absolute names of the modules that a file imports, with the line."""
    tree = ast.parse(path.read_text())
    package = ["mixmesh", *path.relative_to(ROOT).parts[:-1]]
    hidden = set()
    for node in ast.walk(tree):
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if (lazy and not inside_functions) or typing_only:
            hidden.update(id(n) for n in ast.walk(node))
    out = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            out += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for a in node.names:
                # `from . import x`, `from ..lang import x` and `from mixmesh import x` may name modules
                module = node.module is None or name.removeprefix("mixmesh.") in FOLDERS
                module = module or (name == "mixmesh" and a.name in PLACE)
                out.append((f"{name}.{a.name}" if module else name, node.lineno))
    return out


def test_every_module_has_a_layer():
    unknown = {module_of(p) for p in FILES if place_of(module_of(p)) is None} - FOLDERS
    assert not unknown, f"give {unknown} a place in LAYERS"


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_folder_imports_nothing(name):
    assert not [
        n for n, _ in imports(ROOT / name / "__init__.py", inside_functions=True) if n != "__future__"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    own = place_of(module_of(path))
    for name, line in imports(path, inside_functions=True):
        if name != "mixmesh" and not name.startswith("mixmesh."):
            continue
        _, _, module = name.partition(".")
        assert module, f"{path}:{line} imports the root package"
        other = place_of(module)
        is_below = PLACE[other] == PLACE[own] or PLACE[other][0] < PLACE[own][0]
        assert is_below, f"{path}:{line}: {own} imports {other}"


def test_nothing_beside_the_package_is_imported():
    """What is installed does without the repository's other folders."""
    beside = {"benchmarks", "examples", "tests", "tools"}
    taken = [(p, n, line) for p in FILES for n, line in imports(p, inside_functions=True)]
    assert not [(str(p), line) for p, name, line in taken if name.split(".")[0] in beside]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_only_where_it_is_needed(path):
    if is_within(module_of(path), TORCH) or str(path.relative_to(ROOT)) in TORCH_FILES:
        return
    for name, line in imports(path, inside_functions=False):
        assert name.split(".")[0] != "torch", f"{path}:{line} imports torch"
        if name.startswith("mixmesh."):
            module = name.removeprefix("mixmesh.")
            heavy = is_within(module, TORCH | {"frontend.job.workloads"}) and module not in FOLDERS
            assert not heavy, f"{path}:{line} imports {name}, which imports torch"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_framework_names_are_confined(path):
    if is_within(module_of(path), {"frontend", "runtime", "measure.verification", "lang.check"}):
        return
    for name, line in imports(path, inside_functions=True):
        private = name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
        assert not private, f"{path}:{line} imports {name}"


def all_imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """The package's modules that a file imports anywhere: in functions and for types alone too."""
    package = ["mixmesh", *path.relative_to(ROOT).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names.update(f"{stem}.{a.name}" if f"{stem}.{a.name}" in modules else stem for a in node.names)
    return names & modules.keys()


def test_no_module_imports_itself_by_way_of_others():
    """Also where imports inside functions would let it start. A package's face only hands names on: it does
    not count as an importer of its own modules."""
    modules = {}
    for path in FILES:
        parts = ("mixmesh", *path.relative_to(ROOT).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {
        name: {other for other in all_imports(path, modules) if not f"{other}.".startswith(f"{name}.")}
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_no_cycle_at_start():
    import subprocess

    names = [
        f"mixmesh.{n}" for n in ("errors", "lang.ir", "cluster", "lang.rules", "cost", "planner", "__main__")
    ]
    for name in names:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}, sys; sys.exit('torch' in sys.modules)"],
            capture_output=True,
        )
        assert done.returncode == 0, (name, done.stderr.decode())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_imported_exists(path):
    """Also inside functions, where only a run of them would tell."""
    find_trl()
    package = [mixmesh.__name__, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("mixmesh")):
            base = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            module = importlib.import_module(name)
            for a in node.names:
                found = hasattr(module, a.name) or importlib.util.find_spec(f"{name}.{a.name}")
                assert found, f"{path.name}:{node.lineno}: {name} has no {a.name}"
