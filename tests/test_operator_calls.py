"""Operators are called without a function of ours around them, and through PyTorch's own bindings where there
are some; the results are those of ``torch.ops``."""

from __future__ import annotations

import math

import pytest
import torch
from small_graphs import cluster
from torch import nn

from mixmesh.frontend.trace import trace
from mixmesh.frontend.trace.schema import op_name
from mixmesh.lang.ir import map_refs
from mixmesh.lang.rules import RULES
from mixmesh.planner import make_plan
from mixmesh.runtime.direct import BINDINGS, Slot, direct_call
from mixmesh.runtime.local import aten_op, to_torch
from mixmesh.runtime.parallel import parallelize
from tests.rules.rule_proof import gradients, leaf, make_case
from tests.support.rule_samples import SAMPLES

BOUND = {"aten._to_copy", *BINDINGS}
ROWS = sorted(op for op in RULES if op.startswith("aten.") and op_name(aten_op(op)) in BOUND)


def with_slots(value):
    return to_torch(map_refs(value, lambda ref: Slot(ref.name[1:])))


def test_most_bindings_have_samples():
    assert len(ROWS) > 0.9 * len(BINDINGS)
    assert {"aten.linear", "aten.layer_norm", "aten.view"} < set(ROWS)


@pytest.mark.parametrize("op", ROWS)
def test_a_binding_computes_the_same(op):
    for sample in SAMPLES[op]:
        case = make_case(op, sample)
        args = tuple(map(with_slots, case.call.args))
        options = {name: with_slots(value) for name, value in case.call.kwargs}
        call = direct_call(aten_op(op), args, options)
        assert call.function is not aten_op(op)
        leaves = [leaf(x, spec) for x, spec in zip(case.inputs, case.specs)]
        outputs = call(*leaves)
        torch.testing.assert_close(outputs, case.outputs, rtol=0, atol=0)
        for mine, want in zip(gradients(outputs, case.out_grads, leaves), case.in_grads):
            assert (mine is None) == (want is None)
            if mine is not None:
                torch.testing.assert_close(mine, want, rtol=0, atol=0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        first, second = self.norm(x).chunk(2, 0)
        y = self.linear(torch.cat([second, first]))
        return y.masked_fill(y < -10, -math.inf).clamp(min=-1e9).exp().mean()


@pytest.fixture
def parallel():
    torch.manual_seed(0)
    model, batch = Model(), {"x": torch.randn(8, 6)}
    cpu = 'kind = "cpu", name = "cpu", tflop_per_s = 0.1, memory_gib = 8, memory_gbyte_per_s = 10'
    one = cluster(f"[[machine]]\ndevices = [{{ {cpu} }}]")
    plan = make_plan(trace(model, batch), one, planner="single")
    expected = model(**batch)
    made, _ = parallelize(model, None, plan, device="cpu")
    yield made, batch, expected
    made.comm.close()


def test_the_source_calls_operators_directly(parallel):
    model, batch, expected = parallel
    assert model(**batch) == expected
    lines = [line.strip() for line in model.source.splitlines()]
    assert "v_layer_norm = op3(v_x, [6], v_norm_2e_weight, v_norm_2e_bias)" in lines
    assert "v_cat = op5([v_split_2e_1, v_split_2e_0])" in lines
    assert "v_masked_fill = op10(v_linear, v_lt, op10_2)" in lines  # infinity has no literal
