"""Small graphs and clusters for the tests of search, ratios, simulator and planner."""

from __future__ import annotations

import re

from hypothesis import strategies as st

from mixmesh.cluster import Cluster
from mixmesh.lang.ir import Graph, parse_program

TWO = """\
name = "two"
[[machine]]
devices = [
  { name = "fast", tflop_per_s = 2.0, memory_gib = 4, memory_gbyte_per_s = 200, issue_us = 8 },
  { name = "slow", tflop_per_s = 0.7, memory_gib = 3, memory_gbyte_per_s = 80, issue_us = 8 },
]
link_gbit_per_s = LINK
link_latency_us = 5
"""
THREE = """\
name = "three"
[network]
bandwidth_gbit_per_s = LINK
latency_us = 10
[[machine]]
devices = [
  { name = "fast", tflop_per_s = 2.0, memory_gib = 4, memory_gbyte_per_s = 200, issue_us = 8 },
  { name = "slow", tflop_per_s = 0.7, memory_gib = 3, memory_gbyte_per_s = 80, issue_us = 8 },
]
[[machine]]
devices = [{ name = "slow", tflop_per_s = 0.7, memory_gib = 3, memory_gbyte_per_s = 80, issue_us = 8 }]
"""


def cluster(text: str, link_gbit_per_s: float = 10) -> Cluster:
    return Cluster.parse(text.replace("LINK", str(link_gbit_per_s)))


def graph(body: str, scale: int = 1, dtype: str = "f32") -> Graph:
    """The graph of instructions without placements; sizes are multiplied by ``scale``, ``f`` is a dtype."""
    lines = []
    for line in body.strip().split("\n"):
        line = re.sub(r"\bf\[", f"{dtype}[", line)
        head, _, kind = line.rpartition(" : ")

        def grow(found):
            return "[" + ", ".join(str(int(n) * scale) for n in found[1].split(",") if n.strip()) + "]"

        if "return" in line:
            lines.append(line)
        else:
            kinds = ", ".join(
                re.sub(r"\[([^\]]*)\]", grow, k) + " R" for k in re.split(r",(?![^\[]*\])", kind)
            )
            head = re.sub(r"\{([^}]*)\}", grow, head)  # a size among the arguments
            lines.append(f"{head} : {kinds}")
    return parse_program("program small world=1 {\n" + "\n".join(lines) + "\n}\n").graph


MLP = """
%x = input("x") : f[8, 4]
%w = param("w") : f[6, 4]
%b = param("b") : f[6]
%h = aten.linear(%x, %w, %b) : f[8, 6]
%g = aten.relu(%h) : f[8, 6]
%v = param("v") : f[4, 6]
%y = aten.linear(%g, %v) : f[8, 4]
%loss = aten.mean(%y) : f[]
return %loss
"""
RESIDUAL = """
%x = input("x") : f[8, 4]
%w = param("w") : f[4, 4]
%h = aten.linear(%x, %w) : f[8, 4]
%g = aten.relu(%h) : f[8, 4]
%v = param("v") : f[4, 4]
%k = aten.linear(%g, %v) : f[8, 4]
%r = aten.add.Tensor(%h, %k) : f[8, 4]
%q = aten.mul.Tensor(%r, %r) : f[8, 4]
%loss = aten.mean(%q) : f[]
return %loss
"""
TIED = """
%x = input("x") : f[8, 4]
%w = param("w") : f[4, 4]
%h = aten.linear(%x, %w) : f[8, 4]
%g = aten.relu(%h) : f[8, 4]
%y = aten.mm(%g, %w) : f[8, 4]
%loss = aten.mean(%y) : f[]
return %loss
"""
ITSELF = """
%x = input("x") : f[4, 4]
%w = param("w") : f[4, 4]
%s = aten.mm(%w, %w) : f[4, 4]
%y = aten.mm(%x, %s) : f[4, 4]
%z = aten.mm(%y, %x) : f[4, 4]
%loss = aten.mean(%z) : f[]
return %loss
"""
REDUCTION = """
%x = input("x") : f[8, 4]
%w = param("w") : f[4, 4]
%h = aten.linear(%x, %w) : f[8, 4]
%m = aten.sum.dim_IntList(%h, [0], false) : f[4]
%c = aten.sum(%x) : f[]
%n = aten.sum(%m) : f[]
%loss = aten.div.Tensor(%n, %c) : f[]
return %loss
"""
BRANCHES = """
%x = input("x") : f[8, 4]
%u = param("u") : f[4, 4]
%a = aten.linear(%x, %u) : f[8, 4]
%w = param("w") : f[4, 4]
%b = aten.linear(%a, %w) : f[8, 4]
%v = param("v") : f[4, 4]
%c = aten.linear(%a, %v) : f[8, 4]
%t = aten.transpose.int(%c, 0, 1) : f[4, 8]
%p = aten.mm(%b, %t) : f[8, 8]
%loss = aten.mean(%p) : f[]
return %loss
"""
ATTENTION = """
%x = input("x") : f[4, 2, 4]
%w = param("w") : f[4, 4]
%q = aten.linear(%x, %w) : f[4, 2, 4]
%k = aten.transpose.int(%q, 1, 2) : f[4, 4, 2]
%s = aten.bmm(%q, %k) : f[4, 2, 2]
%p = aten.softmax.int(%s, -1) : f[4, 2, 2]
%o = aten.bmm(%p, %q) : f[4, 2, 4]
%loss = aten.mean(%o) : f[]
return %loss
"""
GRAPHS = {
    "mlp": MLP,
    "residual": RESIDUAL,
    "tied": TIED,
    "itself": ITSELF,
    "reduction": REDUCTION,
    "branches": BRANCHES,
    "attention": ATTENTION,
}


ODD = {
    # nothing to cut: the only dim of the batch is 1
    "one row": """
%x = input("x") : f[1, 3]
%w = param("w") : f[1, 3]
%y = aten.linear(%x, %w) : f[1, 1]
%loss = aten.mean(%y) : f[]
return %loss
""",
    "unused parameter": """
%x = input("x") : f[4, 2]
%w = param("w") : f[2, 2]
%idle = param("idle") : f[3]
%y = aten.linear(%x, %w) : f[4, 2]
%loss = aten.mean(%y) : f[]
return %loss
""",
    "inputs of different lengths": """
%x = input("x") : f[6, 2]
%z = input("z") : f[2, 2]
%w = param("w") : f[2, 2]
%y = aten.linear(%x, %w) : f[6, 2]
%q = aten.mm(%y, %z) : f[6, 2]
%loss = aten.mean(%q) : f[]
return %loss
""",
    "scalar parameter": """
%x = input("x") : f[6, 2]
%w = param("w") : f[]
%y = aten.mul.Tensor(%x, %w) : f[6, 2]
%loss = aten.mean(%y) : f[]
return %loss
""",
    "loss of parameters only": """
%w = param("w") : f[3, 2]
%y = aten.mul.Tensor(%w, %w) : f[3, 2]
%loss = aten.sum(%y) : f[]
return %loss
""",
    "loss that is held whole": """
%x = input("x") : f[6, 2]
%w = param("w") : f[2, 2]
%y = aten.linear(%x, %w) : f[6, 2]
%m = aten.mean(%y) : f[]
%loss = aten.relu(%m) : f[]
return %loss
""",
}


@st.composite
def bodies(draw, max_steps: int = 5) -> str:
    """Graphs of a few operators on matrices, with shared values and tied weights."""
    lines = ['%x = input("x") : f[8, 4]']
    held: list[tuple[str, tuple[int, int]]] = [("x", (8, 4))]
    params: list[tuple[str, tuple[int, int]]] = []
    for n in range(draw(st.integers(1, max_steps))):
        # the last values more often, so that graphs are deep and not only wide
        name, (rows, columns) = held[-1 - draw(st.integers(0, min(2, len(held) - 1)))]
        kind = draw(st.sampled_from(["linear", "relu", "add", "mul", "softmax", "transpose", "linear"]))
        if n == 0:
            kind = "linear"
        out = (rows, columns)
        if kind == "linear":
            fitting = [p for p in params if p[1][1] == columns]
            if fitting and draw(st.booleans()):
                weight, shape = draw(st.sampled_from(fitting))
            else:
                weight, shape = f"w{n}", (draw(st.sampled_from([4, 6])), columns)
                params.append((weight, shape))
                lines.append(f'%{weight} = param("{weight}") : f[{shape[0]}, {shape[1]}]')
            out = (rows, shape[0])
            call = f"aten.linear(%{name}, %{weight})"
        elif kind in ("add", "mul"):
            other = draw(st.sampled_from([v for v, shape in held if shape == (rows, columns)]))
            call = f"aten.{kind}.Tensor(%{name}, %{other})"
        elif kind == "softmax":
            call = f"aten.softmax.int(%{name}, -1)"
        elif kind == "transpose":
            out = (columns, rows)
            call = f"aten.transpose.int(%{name}, 0, 1)"
        else:
            call = f"aten.relu(%{name})"
        lines.append(f"%v{n} = {call} : f[{out[0]}, {out[1]}]")
        held.append((f"v{n}", out))
    lines += [f"%loss = aten.mean(%{held[-1][0]}) : f[]", "return %loss"]
    return "\n".join(lines)
