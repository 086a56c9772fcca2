"""Programs of other shapes, all ranks in one process: carried over from the planned one, or lowered."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from small_graphs import THREE, cluster
from torch import nn

from mixmesh.api import plan_traced
from mixmesh.errors import MixmeshError
from mixmesh.frontend.trace import PASSES, trace
from mixmesh.frontend.trace.shapes import passes_for
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import MicroBatch
from mixmesh.measure.verification import verify
from mixmesh.runtime.shapes.agree import _are_whole_by_others, _choices, resolve
from mixmesh.runtime.shapes.carry import CannotCarry, carry
from mixmesh.runtime.shapes.lower import lower
from mixmesh.runtime.shapes.parts import resized
from mixmesh.runtime.shapes.room import live_bytes

WORDS = 13


class Attention(nn.Module):
    """One mask for all samples and heads, expanded; a loss of what counts; batch norm if asked for."""

    def __init__(self, *, norm: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.start = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, WORDS)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, ids, labels):
        n, t = ids.shape
        x = self.embedding(ids) + self.start.expand(n, t, 8)
        q, k, v = self.qkv(x).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norm((x + y.transpose(1, 2).reshape(n, t, 8)).flatten(0, 1))
        return F.cross_entropy(self.head(x), labels.flatten(), ignore_index=0)


def words(size: int, length: int) -> dict:
    ids = torch.randint(WORDS, (size, length), generator=torch.Generator().manual_seed(size * 10 + length))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def plan_with(planner: str, **kwargs):
    return plan_traced(trace(Attention(**kwargs), words(12, 6)), cluster(THREE), planner=planner)


def traced(plan, size: int, length: int, **kwargs):
    return trace(Attention(**kwargs), words(size, length), passes=passes_for(plan.program))


@pytest.mark.parametrize("planner", ["hap", "fsdp-even", "tensor-parallel"])
def test_what_is_carried_over_is_the_single_device_s(planner):
    plan = plan_with(planner)
    for size, length in ((7, 3), (4, 1), (3, 9)):
        program = carry(plan.program, traced(plan, size, length).graph)
        assert [i.op for i in program.instructions] == [i.op for i in plan.program.instructions]
        assert program.ratios == plan.program.ratios
        assert verify(Attention(), words(size, length), program).ok, (size, length)


class Routed(Attention):
    """Counts the best two of every position, in units of the length, and does not use their values."""

    def forward(self, ids, labels):
        n, t = ids.shape
        scores = self.head(self.embedding(ids)).flatten(0, 1)
        best = F.one_hot(torch.topk(scores.softmax(-1), 2).indices, WORDS)
        kept = (ids != 0)[:, :, None, None].expand(n, t, 2, WORDS).reshape(-1, 2, WORDS)
        return (scores * (best * kept).float().sum(1)).square().mean()


@pytest.mark.parametrize("planner", ["ddp-proportional", "fsdp-even"])
def test_results_that_nobody_uses_are_cut_in_the_units_of_their_call(planner):
    plan = plan_traced(trace(Routed(), words(12, 6)), cluster(THREE), planner=planner)
    topk = next(i for i in plan.program.instructions if i.op == "aten.topk")
    assert topk.results[0] is None and topk.types[0].placement.unit == 6, "the lengths are units"
    for size, length in ((7, 3), (3, 9)):
        graph = trace(Routed(), words(size, length), passes=passes_for(plan.program)).graph
        for program in (carry(plan.program, graph), lower(graph, plan.program)):
            assert verify(Routed(), words(size, length), program).ok, (size, length)


@pytest.mark.parametrize("planner", ["hap", "fsdp-even", "tensor-parallel", "two-level"])
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_lowered_is_the_single_device_s(planner, norm):
    plan = plan_with(planner, norm=norm)
    for size, length in ((1, 6), (7, 4)):
        program = lower(traced(plan, size, length, norm=norm).graph, plan.program)
        assert verify(Attention(norm=norm), words(size, length), program).ok, (size, length)
        stored = {(i.args[0], i.type) for i in plan.program.params}
        assert {(i.args[0], i.type) for i in program.params} <= stored, "parameters are where they were"


def test_data_parallelism_is_lowered_to_itself():
    """Nothing but gradients travels."""
    plan = plan_with("ddp-proportional")
    program = lower(traced(plan, 7, 6).graph, plan.program)
    moves = [i for i in program.instructions if i.is_redistribution]
    planned = [i for i in plan.program.instructions if i.is_redistribution]
    assert [i.op for i in moves] == [i.op for i in planned]


def test_what_does_nothing_for_a_shape_is_kept():
    plan = plan_with("hap")
    with pytest.raises(CannotCarry, match="other operators") as caught:
        carry(plan.program, trace(Attention(), words(1, 1), passes=PASSES).graph)
    assert re.fullmatch(r"no aten\.\w+ of \S+\.py:\d+", caught.value.got), "which operator is absent"
    assert len(traced(plan, 1, 1).graph.nodes) == len(plan.program.graph.nodes)


def test_other_operators_are_not_carried_over():
    plan = plan_with("hap")
    for model in (Attention(norm=True), Attention(norm=True).eval()):
        graph = trace(model, words(7, 6), passes=passes_for(plan.program)).graph
        with pytest.raises(CannotCarry):
            carry(plan.program, graph)


@pytest.mark.parametrize("planner", ["ddp-proportional", "hap"])
def test_as_many_words_in_more_rows(planner):
    """Values that hold all words keep their shape, and are cut between other rows."""
    plan = plan_with(planner)
    for size, length in ((24, 3), (6, 12), (18, 4)):
        program = carry(plan.program, traced(plan, size, length).graph)
        assert verify(Attention(), words(size, length), program).ok, (size, length)


class Shorter(Attention):
    """Short batches count twice: one more operator, after all that was planned."""

    def forward(self, ids, labels):
        loss = super().forward(ids, labels)
        return loss * 2 if ids.shape[1] < 5 else loss


def test_what_a_model_does_besides_for_a_shape_is_not_left_out():
    plan = plan_traced(trace(Shorter(), words(12, 6)), cluster(THREE), planner="hap")
    graph = trace(Shorter(), words(7, 4), passes=passes_for(plan.program)).graph
    with pytest.raises(CannotCarry, match="computes something else"):
        carry(plan.program, graph)
    assert verify(Shorter(), words(7, 4), lower(graph, plan.program)).ok


def test_micro_batches_of_another_size():
    plan = plan_with("ddp-proportional")
    counts = [2, 2, 2]
    rows = tuple(MicroBatch(n, 2, n) for n in counts)
    program = plan.program.changed(ratios=((plan.program.ratios[0][0], (0.333334, 0.333333, 0.333333)),))
    planned = type(plan)(program, "test", 0.0, (), "", micro_batches=rows)
    made = resized(planned, carry(program, traced(plan, 5, 6).graph))
    assert [sum(m.sizes) for m in made.micro_batches] == [2, 2, 1]
    larger = resized(planned, carry(program, traced(plan, 24, 6).graph))
    assert [m.steps for m in larger.micro_batches] == [4] * 3


def test_a_forward_pass_holds_less_than_a_step():
    plan = plan_with("ddp-proportional")
    small, large = (carry(plan.program, traced(plan, n, 6).graph) for n in (6, 24))
    assert all(a < b for a, b in zip(live_bytes(small), live_bytes(large)))


def agreed(program, rows: list[tuple[int, int]], *, are_same: bool = False) -> tuple:
    told = (tuple(rows), tuple(rows))
    inputs = [i for i in program.instructions if i.op == "input"]
    return resolve(program, told, [_choices(program, i, told[0]) for i in inputs], are_same=are_same)


def test_ranks_agree_on_a_batch():
    program = plan_with("ddp-proportional").program
    program = program.changed(ratios=((program.ratios[0][0], (0.5, 0.333333, 0.166667)),))
    assert agreed(program, [(12, 6)] * 3)[0] == (12, 6)
    assert agreed(program, [(6, 6), (4, 6), (2, 6)])[0] == (12, 6)
    assert agreed(program, [(6, 6), (12, 6), (2, 6)])[0] == (12, 6)
    assert agreed(program, [(2, 4), (2, 4), (1, 4)])[0] == (5, 4)
    assert agreed(program, [(1, 4), (0, 4), (0, 4)])[0] == (1, 4)
    assert agreed(program, [(6, 6)] * 3)[0] == (6, 6)
    assert agreed(program, [(1, 6)] * 3, are_same=True)[0] == (1, 6)
    assert agreed(program, [(1, 6)] * 3)[0] == (3, 6)
    for rows in ([(6, 6), (4, 5), (2, 6)], [(3, 6), (4, 6), (5, 6)], [(0, 6)] * 3):
        with pytest.raises(MixmeshError, match="neither one whole batch"):
            agreed(program, rows)


WHOLE_BESIDE_CUT = """
program pair world=2 {
  ratio r0 = [0.5, 0.5]
  %x = input("x") : f32[12, 6] R
  %y = input("y") : f32[12] S(0)@r0
  %a = aten.sum(%x) : f32[] R
  %b = aten.sum(%y) : f32[] P(sum)
  %c = all_reduce(%b) : f32[] R
  %loss = aten.add(%a, %c) : f32[] R
  return %loss
}
"""


def test_an_input_that_is_whole_everywhere_tells_what_the_others_are():
    """Two labels on each rank, alike by chance, are of a batch of four if there are four inputs."""
    program = parse_program(WHOLE_BESIDE_CUT)
    cases = (4, 2, False), (4, 4, True), (12, 6, False), (7, 4, None), (3, 2, None)
    for size, rows, are_whole in cases:
        told = ((size, 6),) * 2, ((rows,),) * 2
        choices = [_choices(program, i, given) for i, given in zip(program.batch_inputs, told)]
        assert _are_whole_by_others(program, told, choices) is are_whole, (size, rows)
        if are_whole is not None:
            shapes = resolve(program, told, choices, are_same=are_whole, are_parts=not are_whole)
            assert shapes == ((size, 6), (size,))


CUT_ALONG_TWO_DIMS = """
program pair world=2 {
  ratio r0 = [0.5, 0.5]
  %x = input("x") : f32[8, 8] S(1)@r0
  %noise = input("noise") : f32[8, 4] S(0)@r0
  %a = aten.sum(%x) : f32[] P(sum)
  %b = aten.sum(%noise) : f32[] P(sum)
  %loss = aten.add(%a, %b) : f32[] P(sum)
  return %loss
}
"""


def test_samples_are_compared_along_one_dim():
    """One input is cut along its features, which happen to be as many as the samples."""
    program = parse_program(CUT_ALONG_TWO_DIMS)
    inputs, shapes = program.batch_inputs, ((4, 8), (4, 4))
    told = tuple((shape, shape) for shape in shapes)
    choices = [_choices(program, i, rows) for i, rows in zip(inputs, told)]
    assert resolve(program, told, choices, are_same=True) == shapes
