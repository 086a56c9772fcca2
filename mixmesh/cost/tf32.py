"""Warnings about TF32: for a job that does not use it on cards that have it, and for a profile measured under
another setting."""

from __future__ import annotations

from ..lang.ir import Graph
from ..lang.rules import call_of
from .kernels import CONVOLUTIONS
from .model import CostModel
from .work import is_product

SETTING = "torch.backends.cuda.matmul.allow_tf32"
# ratio of the TF32 peak to that of plain float32 below which TF32 saves nothing, as on GeForce cards
WORTH = 1.5
PROFILED = "tf32"  # the key in a profile's provenance; its value is "on" or "off"


def tf32_warnings(costs: CostModel, graph: Graph) -> tuple[str, ...]:
    """The warnings of a plan made with these costs."""
    profiled = costs.profile.provenance.get(PROFILED) if costs.profile else None
    warnings = []
    if profiled is not None and (profiled == "on") != costs.tf32:
        warnings.append(
            f"the profile was measured with {SETTING} {profiled} and the job has it {state_of(costs.tf32)}: "
            "profile it again"
        )
    cards = [d.name for d in costs.classes if d.tf32_flop_per_s > WORTH * d.flop_per_s]
    if cards and not costs.tf32 and has_float32_products(graph):
        warnings.append(
            f"products of float32 run without TF32, which {', '.join(cards)} would do several times as fast "
            f"with 10 bits of precision: {SETTING} = True before the job is traced"
        )
    return tuple(warnings)


def has_float32_products(graph: Graph) -> bool:
    """Whether TF32 would change any product: a float32 one that is not a convolution, as these use it
    anyway."""
    calls = (call_of(node, graph.types) for node in graph.nodes if node.op.startswith("aten."))
    return any(
        is_product(call) and not call.op.startswith(CONVOLUTIONS) and call.outputs[0].dtype == "f32"
        for call in calls
    )


def state_of(is_on: bool) -> str:
    """A profile's word for the setting."""
    return "on" if is_on else "off"
