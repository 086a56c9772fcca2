"""Programs for tests: a small one by hand, and generated ones."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from mixmesh.cluster import Cluster
from mixmesh.lang.ir import (
    PARTIAL,
    REPLICATE,
    DType,
    Instruction,
    Program,
    Ref,
    Shard,
    TensorType,
    ValueType,
    make_ratio,
)
from mixmesh.lang.ir.types import DTYPE_BYTES
from mixmesh.lang.plan_file import Candidate, Plan

MLP = """\
program mlp world=3 {
  ratio r0 = [0.5, 0.3, 0.2]
  ratio r1 = [0.6, 0.4, 0]
  %x = input("x") : f32[20, 8] S(0)@r0
  %w = param("w") : f32[6, 8] R
  %h = aten.linear(%x, %w) : f32[20, 6] S(0)@r0
  %h.r = all_gather(%h) : f32[20, 6] R
  %g = aten.relu(%h.r) : f32[20, 6] R
  %g.s1 = local_slice(%g) : f32[20, 6] S(1)@r0
  %loss = aten.mean(%g.s1) : f32[] P(sum)
  return %loss
}
"""

TWO_DEVICES = """\
name = "two"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3 }]
"""

THREE_DEVICES = """\
name = "three"
[[machine]]
devices = [{ cpu_share = 0.6 }, { cpu_share = 0.3, count = 2 }]
"""


def make_plan(program: Program, cluster: Cluster, **changes) -> Plan:
    """A plan around a program, as a planner would write it."""
    fields = dict(
        program=program,
        planner="hap",
        predicted_step_s=0.0125,
        predicted_peak_memory_bytes=(10**9,) * program.world_size,
        cluster_fingerprint=cluster.fingerprint,
        cluster_name=cluster.name,
        graph_fingerprint=program.graph.fingerprint,
        candidates=(Candidate("hap", True, 0.0125), Candidate("fsdp-even", False, math.inf)),
    )
    return Plan(**{**fields, **changes})


# --- generated programs: any text that the grammar allows, whether it computes something or not ------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,8}", fullmatch=True)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    dtypes.map(DType),
)


@st.composite
def types(draw, ratios) -> TensorType:
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=4)))
    value = ValueType(draw(dtypes), shape)
    placement = draw(st.sampled_from([REPLICATE, PARTIAL]))
    if shape and ratios and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        units = [u for u in range(1, 13) if shape[dim] % u == 0]
        placement = Shard(dim, draw(st.sampled_from(units)))
        return TensorType(value, placement, draw(st.sampled_from(ratios)))
    return TensorType(value, placement, draw(st.sampled_from([None, *ratios])))


@st.composite
def programs(draw) -> Program:
    world_size = draw(st.integers(1, 5))
    shares = st.lists(st.floats(0, 1), min_size=world_size, max_size=world_size).filter(
        lambda s: sum(s) > 0.1
    )
    ratios = draw(st.dictionaries(names, shares.map(make_ratio), max_size=3))
    free = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    known: list[str] = []
    instructions = []
    for name in free:
        arguments = st.one_of(scalars, st.sampled_from(known).map(Ref)) if known else scalars
        arguments = st.recursive(arguments, lambda a: st.lists(a, max_size=3).map(tuple), max_leaves=6)
        extra = draw(st.booleans())
        instructions.append(
            Instruction(
                results=(name, None) if extra else (name,),
                types=tuple(draw(types(list(ratios))) for _ in range(1 + extra)),
                op=draw(st.sampled_from(["aten.add.Tensor", "aten.native_dropout", "input", "all_gather"])),
                args=tuple(draw(st.lists(arguments, max_size=3))),
                kwargs=tuple(draw(st.dictionaries(names, arguments, max_size=2)).items()),
                attrs=tuple(draw(st.dictionaries(names, scalars, max_size=2)).items()),
            )
        )
        known.append(name)
    return Program(
        draw(names), world_size, tuple(ratios.items()), tuple(instructions), draw(st.sampled_from(known))
    )
