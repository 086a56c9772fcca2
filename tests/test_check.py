"""Edited programs: what is not valid is refused, with its line."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from programs import MLP, THREE_DEVICES, TWO_DEVICES, make_plan

from mixmesh.cluster import Cluster
from mixmesh.errors import PlanError, VerificationError
from mixmesh.lang.check import check_placements, check_plan, check_program
from mixmesh.lang.ir import Graph, Instruction, Node, Program, Ref, TensorType, ValueType, parse_program


def test_a_valid_program():
    check_program(parse_program(MLP))


# what is edited, what stands instead, the line, what the message says, what was expected
LINEAR, SLICE, GATHER = (
    "linear(%x, %w) : f32[20, 6] ",
    "local_slice(%g) : f32[20, 6] ",
    "all_gather(%h) : f32[20, 6] ",
)
RELU = "aten.relu(%h.r) : f32[20, 6]"
WRONG = {
    "operator": ("aten.relu(", "aten.reluu(", 8, "PyTorch has no operator aten.reluu", ""),
    "bare operator": ("aten.relu(", "relu(", 8, "unknown operator relu", "ATen operator"),
    "shape": (RELU, "aten.relu(%h.r) : f32[20, 3]", 8, "another type", "f32[20, 6]"),
    "arguments": ("aten.relu(%h.r)", "aten.relu(%h.r, 1)", 8, "does not take these arguments", ""),
    "inner size": ("f32[6, 8] R", "f32[6, 9] R", 6, "does not take these arguments", ""),
    "strategy": (LINEAR + "S(0)@r0", LINEAR + "R", 6, "cannot be computed", "(S(0), R) -> S(0)"),
    "partial": (GATHER + "R", "pad_partial(%h) : f32[20, 6] P(sum)", 8, "cannot be computed", "S(0) -> S(0)"),
    "redistribution": ("all_gather(%h)", "all_reduce(%h)", 7, "does not turn S(0) into R", "all_gather"),
    "nothing to do": (GATHER + "R", "move(%h) : f32[20, 6] S(0)@r0", 7, "nothing to do", ""),
    "value": (GATHER, "all_gather(%h) : f32[20, 7] ", 7, "does not change the value", "f32[20, 6]"),
    "ratio": (SLICE + "S(1)@r0", SLICE + "S(1)@r1", 9, "does not change the ratio", "move"),
    "other ranks": (RELU + " R", RELU + " R@r1", 8, "same ranks", ""),
    "other cut": (LINEAR + "S(0)@r0", LINEAR + "S(0)@r2", 6, "cut by one ratio", "@r0"),
    "partial input": ("8] S(0)@r0", "8] P(sum)", 4, "cannot be held as P(sum)", "R or S(dim)"),
    "max": ("f32[] P(sum)", "f32[] P(max)", 10, "P(max) is not supported", "P(sum)"),
    "loss whole": ("%g.s1) : f32[] P(sum)", "%g) : f32[] R", 10, "not held as a sum", "P(sum)"),
    "loss no scalar": ("return %loss", "return %g", 8, "no scalar", "f32[]"),
    "no input": ('input("x")', "input(3)", 4, "no input", ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_line_is_named(case):
    old, new, line, message, expected = WRONG[case]
    text = MLP.replace(old, new, 1)
    assert text != MLP
    if "@r2" in text:
        text = text.replace("r1 = [0.6, 0.4, 0]", "r2 = [0.2, 0.3, 0.5]")
    with pytest.raises(VerificationError) as caught:
        check_program(parse_program(text), "x.plan")
    error = caught.value
    assert error.where.startswith(f"x.plan:{line}: "), error.where
    assert text.split("\n")[line - 1].strip() in error.where
    assert message in error.message and expected in error.expected and error.hint


POOL = """program pooled world=2 {
  ratio r0 = [0.5, 0.5]
  %x = input("x") : f32[4, 3, 8, 8] S(0)@r0
  %p = aten.max_pool2d(%x, 2, [2, 2]) : f32[4, 3, 4, 4] S(0)@r0
  %loss = aten.sum(%p) : f32[] P(sum)@r0
  return %loss
}
"""


def test_arguments_that_a_rule_cannot_read_are_named():
    """One number for both dims of a kernel is not among them: PyTorch takes it."""
    check_program(parse_program(POOL))
    with pytest.raises(VerificationError, match="arguments do not fit aten.max_pool2d") as caught:
        check_placements(parse_program(POOL.replace("%x, 2, [2, 2]", "%x, 2, 0.5")), "x.plan")
    assert caught.value.where.startswith("x.plan:4: ")


def test_what_is_allowed_is_listed():
    text = MLP.replace("%x, %w) : f32[20, 6] S(0)@r0", "%x, %w) : f32[20, 6] S(1)@r0")
    with pytest.raises(VerificationError) as caught:
        check_placements(parse_program(text))
    assert caught.value.expected.startswith("(S(0), R) -> S(0)")
    assert caught.value.got == "(S(0), R) -> S(1)"


def test_one_way_to_cut():
    text = MLP.replace("ratio r1 = [0.6, 0.4, 0]", "ratio r1 = [0.2, 0.3, 0.5]")
    text = text.replace("%h.r = all_gather(%h) : f32[20, 6] R", "%h.r = move(%h) : f32[20, 6] S(0)@r1")
    text = text.replace("aten.relu(%h.r) : f32[20, 6] R", "aten.add.Tensor(%h.r, %h) : f32[20, 6] S(0)@r0")
    with pytest.raises(VerificationError, match="cut by one ratio"):
        check_program(parse_program(text))


def value(dtype: str, *shape: int) -> TensorType:
    return TensorType(ValueType(dtype, shape))


def test_programs_that_never_were_text():
    relu = Instruction(("y",), (value("f32", 2),), "aten.relu", (Ref("x"),))
    with pytest.raises(VerificationError) as caught:
        check_program(Program("p", 1, (), (relu,), "y"))
    assert "%x is used before" in caught.value.message and "instruction 0: %y" in caught.value.where
    x = Instruction(("x",), (value("f32", 2),), "input", ("x",))
    with pytest.raises(VerificationError, match="defined twice"):
        check_program(Program("p", 1, (), (x, x), "x"))
    with pytest.raises(VerificationError, match="loss %z is not defined"):
        check_program(Program("p", 1, (), (x,), "z"))
    with pytest.raises(VerificationError, match="2 shares"):
        check_program(Program("p", 1, (("r", (0.5, 0.5)),), (x,), "x"))


def test_an_operator_without_a_rule_is_whole():
    text = MLP.replace("aten.relu(", "aten.special_i1(")
    check_program(parse_program(text))
    sharded = text.replace("aten.special_i1(%h.r) : f32[20, 6] R", "aten.special_i1(%h) : f32[20, 6] S(0)@r0")
    with pytest.raises(VerificationError) as caught:
        check_program(parse_program(sharded))
    assert "no sharding rule" in caught.value.message and "%h S(0)@r0" in caught.value.got


def test_updates_and_constants():
    head = 'program p world=2 {\n  ratio r0 = [0.5, 0.5]\n  %b = buffer("b") : f32[4] S(0)@r0\n'
    tail = (
        '  %w = param("w") : f32[4] R\n  %s = aten.sum(%w) : f32[] R\n  %l = as_partial(%s) : f32[] P(sum)\n'
    )
    end = "  return %l\n}\n"
    check_program(parse_program(head + tail + end))
    with pytest.raises(VerificationError) as caught:
        check_program(parse_program(head + '  update("b", %b)\n' + tail + end))
    assert caught.value.hint == ("%x = all_gather(%b)",) and caught.value.where.startswith("line 4")
    whole = '  %b.r = all_gather(%b) : f32[4] R\n  update("b", %b.r)\n'
    check_program(parse_program(head + whole + tail + end))
    with pytest.raises(VerificationError, match="does not fit the buffer"):
        check_program(parse_program(head + tail + '  update("b", %s)\n' + end))
    with pytest.raises(VerificationError, match="3 numbers for"):
        check_program(parse_program(head + "  %c = const([1.0, 2.0, 3.0]) : f32[4] R\n" + tail + end))
    with pytest.raises(VerificationError, match="held whole"):
        check_program(parse_program(head + "  %c = const([1, 2]) : i64[2] S(0)@r0\n" + tail + end))


def test_a_rank_that_reads_a_buffer_gets_its_new_value():
    text = """\
program p world=2 {
  ratio r0 = [1, 0]
  %b = buffer("b") : f32[4] R
  %w = param("w") : f32[4] R
  %y = aten.mul.Tensor(%w, %b) : f32[4] R
  %y.0 = move(%y) : f32[4] R@r0
  update("b", %y.0)
  %s = aten.sum(%y) : f32[] R
  %l = as_partial(%s) : f32[] P(sum)
  return %l
}
"""
    with pytest.raises(VerificationError, match="not all ranks that read a buffer") as caught:
        check_program(parse_program(text))
    assert caught.value.where.startswith("line 7") and "rank 1 reads %b" in caught.value.got
    both = text.replace('update("b", %y.0)', '%y.1 = move(%y.0) : f32[4] R\n  update("b", %y.1)')
    check_program(parse_program(both))


def test_units_of_a_view():
    text = """\
program p world=2 {
  ratio r0 = [0.5, 0.5]
  %x = param("x") : f32[4, 6] S(0)@r0
  %y = aten.view(%x, [24]) : f32[24] S(0, 6)@r0
  %l = aten.sum(%y) : f32[] P(sum)
  return %l
}
"""
    check_program(parse_program(text))
    with pytest.raises(VerificationError) as caught:
        check_program(parse_program(text.replace("S(0, 6)", "S(0, 4)")))
    assert "units" in caught.value.expected


# --- plans -------------------------------------------------------------------------------------------------

THREE, TWO = Cluster.parse(THREE_DEVICES), Cluster.parse(TWO_DEVICES)


def test_a_plan_of_this_cluster_and_model():
    program = parse_program(MLP)
    plan = make_plan(program, THREE)
    check_plan(plan, THREE, program.graph)
    # a name is no figure
    check_plan(plan, Cluster.parse(THREE_DEVICES.replace('"three"', '"other"')))


def test_a_plan_for_another_cluster():
    plan = make_plan(parse_program(MLP), THREE)
    with pytest.raises(PlanError) as caught:
        check_plan(plan, TWO, where="x.plan")
    assert "3 devices, not 2" in caught.value.got and "three" in caught.value.expected
    faster = Cluster.parse(THREE_DEVICES.replace("0.6", "0.7"))
    with pytest.raises(PlanError) as caught:
        check_plan(plan, faster)
    assert faster.fingerprint in caught.value.got and THREE.fingerprint in caught.value.expected
    assert "mixmesh plan" in caught.value.hint[0]


def changed(graph: Graph, change) -> Graph:
    return replace(graph, nodes=tuple(map(change, graph.nodes)))


def test_a_plan_for_another_model():
    plan = make_plan(parse_program(MLP), THREE)
    graph = plan.program.graph

    def wider(n: Node) -> Node:
        return replace(n, types=(ValueType("f32", (7, 8)),)) if n.op == "param" else n

    with pytest.raises(PlanError) as caught:
        check_plan(plan, graph=changed(graph, wider))
    assert caught.value.expected == "parameter w f32[6, 8]" and caught.value.got == "parameter w f32[7, 8]"

    def renamed(n: Node) -> Node:
        return replace(n, args=("v",)) if n.op == "param" else n

    with pytest.raises(PlanError) as caught:
        check_plan(plan, graph=changed(graph, renamed))
    assert "no parameter v" in caught.value.expected and "no parameter w" in caught.value.got

    def tanh(n: Node) -> Node:
        return replace(n, op="aten.tanh") if n.op == "aten.relu" else n

    with pytest.raises(PlanError) as caught:
        check_plan(plan, graph=changed(graph, tanh))
    assert caught.value.expected == "aten.relu : f32[20, 6]" and caught.value.got == "aten.tanh : f32[20, 6]"


def test_a_plan_reads_back_equal(tmp_path):
    plan = make_plan(parse_program(MLP), THREE, warnings=('a "quoted" warning',), predicted_step_s=math.inf)
    plan.save(tmp_path / "x.plan")
    assert type(plan).load(tmp_path / "x.plan") == plan
