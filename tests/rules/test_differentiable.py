"""The operators whose results have no gradient are those of which PyTorch says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torchgen
from rule_proof import RANDOM, make_case

from mixmesh.lang.ir import NOT_DIFFERENTIABLE
from mixmesh.lang.rules import RULES
from tests.support.rule_samples import SAMPLES

yaml = pytest.importorskip("yaml")
FORMULAS = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
# their results are integers, truth values or no dense tensors, which never have a gradient
NOT_FLOATING = re.compile(
    r"aten\.(all|any|eq|ne|ge|gt|le|lt|isnan|one_hot|nonzero|multinomial|count_nonzero|hash_tensor"
    r"|_?indices|_?values|\w+_indices|_is_all_true|_is_any_true)(\.|$)"
)
# of kernels for other devices, and what export never leaves in a graph
OTHERS = {"aten._efficientzerotensor", "aten._new_zeros_with_same_feature_meta"}


def formulas_without_gradients() -> set[str]:
    """Operators that return what they make, all of it without a gradient, by PyTorch's table."""
    found = set()
    for row in yaml.safe_load(FORMULAS.read_text()):
        op, arguments = re.match(r"([\w.]+)\((.*)\) -> ", row["name"]).groups()
        tensors = [a.split()[-1].partition("=")[0] for a in arguments.split(", ") if re.match(r"Tensor\W", a)]
        formulas = {name.strip(): formula for names, formula in row.items() for name in names.split(",")}
        has_none = all(formulas.get(t, "non_differentiable") == "non_differentiable" for t in tensors)
        by_device = "dispatch" in row or "backward" in op
        none = not any(row.get("output_differentiability", [True]))
        in_place = op.partition(".")[0].endswith("_")
        if (none or (has_none and "result" not in row)) and not by_device and not in_place:
            found.add(f"aten.{op}")
    return {op for op in found if not NOT_FLOATING.match(op)} - OTHERS


def test_all_of_pytorchs_table_are_known():
    derived = formulas_without_gradients()
    assert len(derived) > 40 and "aten.histc" in derived
    assert derived - NOT_DIFFERENTIABLE == set()


@pytest.mark.parametrize("op", sorted((RULES.keys() & SAMPLES.keys()) - RANDOM))
def test_results_have_gradients_or_are_known_to_have_none(op):
    """Executed: where a floating input has a gradient, a floating result has one too."""
    for sample in SAMPLES[op]:
        case = make_case(op, sample)
        floating = [
            g for g, t in zip(case.out_grads, case.outputs) if t.is_floating_point() or t.is_complex()
        ]
        learns = any(spec.grad and t.is_floating_point() for spec, t in zip(case.specs, case.inputs))
        if floating and learns:
            assert any(g is not None for g in floating) is (op not in NOT_DIFFERENTIABLE)
