"""mixmesh explain, of every planner's plans: over one ratio, over several, in stages, per machine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from test_recompute import Model, batch, gpus, long_job
from test_two_level import CLUSTER

from mixmesh.__main__ import execute
from mixmesh.api import plan_traced
from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.calls import is_computation
from mixmesh.errors import InputError
from mixmesh.explain import explain_plan, explain_tensor
from mixmesh.explain.report.facts import facts_of, what_if
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import Shard, parse_program, regions, support
from mixmesh.lang.plan_file import Candidate, Plan
from mixmesh.measure.verification import TOLERANCE_F64, verify
from mixmesh.search.placement.join import join
from mixmesh.search.placement.lift import lifted, placed_of, ratios_of
from mixmesh.search.placement.lower import lower
from mixmesh.search.placement.split import split
from mixmesh.simulator import simulate
from tests.support.small_devices import free_communicators  # noqa: F401

SAMPLES = 20
PLANNERS = {
    "single": "single",
    "ddp": "ddp-proportional",
    "fsdp": "fsdp-even",
    "hap": "hap",
    "tensor-parallel": "tensor-parallel",
    "model-parallel": "model-parallel",
    "pipeline": "pipeline",
    "segments": "segments",
    "placed": "placed",
    "heterog": "heterog",
    "tag": "tag",
    "two-level": "two-level",
    "recomputed": "hap",
    "in micro-batches": "poplar",
}
SMALL = {"recomputed": gpus(5, 5), "in micro-batches": gpus(2.5, 2.5)}  # devices that hold a part of the job
TENSORS = ("layers.1.up.weight", "gelu", "table.weight", "ids")


@cache
def traced():
    torch.manual_seed(0)
    model, data = Model(width=16, layers=2), batch(samples=SAMPLES)
    return model, data, trace(model, data)


def job(name: str):
    return long_job() if name in SMALL else traced()


def cluster_of(name: str) -> Cluster:
    return SMALL.get(name) or Cluster.parse(CLUSTER)


@cache
def planned(name: str) -> Plan:
    """As it is read from a file."""
    if name in ("heterog", "tag"):
        pytest.importorskip("torch_geometric")
    made = plan_traced(job(name)[2], cluster_of(name), planner=PLANNERS[name], search_s=2)
    return Plan.parse(str(made))


@cache
def explain(name: str, tensor: str, **options):
    return explain_tensor(planned(name), cluster_of(name), tensor, **options)


def test_the_plans_are_of_all_kinds():
    """What the tests below rest on."""
    assert planned("pipeline").order == "1f1b"
    assert planned("two-level").program.copies
    assert regions(planned("recomputed").program)
    tight = planned("in micro-batches")
    assert max(m.steps for m in tight.micro_batches) > 1 and regions(tight.program)
    assert any(i.attr("owned") for i in planned("placed").program.params)
    kinds = {
        name: explain_plan(planned(name), cluster_of(name)).kind for name in ("hap", "pipeline", "two-level")
    }
    assert kinds == {"hap": "one program", "pipeline": "stages", "two-level": "machines"}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", PLANNERS)
def test_the_plans_own_placement_costs_the_plans_step_or_less(name, tensor):
    plan, found = planned(name), explain(name, tensor)
    assert found.step_s == pytest.approx(plan.predicted_step_s)
    assert [a.is_plan for a in found.alternatives].count(True) == 1
    assert found.own.step_s <= plan.predicted_step_s * (1 + 1e-9) and found.own.fits
    assert found.own.placement == found.placement
    assert len({a.placement for a in found.alternatives}) == len(found.alternatives)
    faster = [a for a in found.alternatives if a.fits and a.step_s < found.step_s * (1 - 1e-6)]
    assert found.can_be_improved == bool(faster) == ("can be improved" in found.summary)
    for a in found.alternatives:
        assert bool(a.impossible) == (a.program is None)


def stored(program, name: str) -> set[str]:
    """How a program makes or loads a tensor, in every machine that has it."""
    found = set()
    for i in program.instructions:
        of = {*i.results, *(i.args[:1] if i.is_leaf else ())}
        if i.is_redistribution or i.op == "aten.slice.Tensor":
            continue
        if of & {name, f"{name}.m0", f"{name}.m1"}:
            found |= {str(t.placement).split(",")[0].rstrip(")") for t in i.types}
    return found


@pytest.mark.parametrize("tensor", TENSORS[:2])
@pytest.mark.parametrize("name", PLANNERS)
def test_every_alternative_equals_the_single_device(name, tensor):
    model, data, known = job(name)
    programs = {a.placement: a.program for a in explain(name, tensor).alternatives if a.program is not None}
    for placement, program in programs.items():
        program = parse_program(str(program))
        check_program(program)
        held = {text.partition("@")[0].rstrip(")") for text in placement.split(", ")}
        assert stored(program, tensor) == held, placement
        if name not in SMALL or placement != "R":
            report = verify(model, data, program, traced=known)
            assert report.max_loss_error_f64 <= TOLERANCE_F64, (placement, report)
            assert report.max_gradient_error_f64 <= TOLERANCE_F64, (placement, report)


# --- stages and groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-parallel", "pipeline", "placed", "segments", "tag"])
def test_lifted_and_lowered_again_a_program_is_what_it_was(name):
    plan = planned(name)
    made = lower(lifted(plan.program), placed_of(plan.program))
    assert made.graph.nodes == plan.program.graph.nodes
    for i in plan.program.instructions:
        if not i.is_redistribution and not i.attr("owned"):
            other = made.producers[i.results[0]]
            assert [(t.value, t.placement) for t in other.types] == [(t.value, t.placement) for t in i.types]
            assert [made.participants(t) for t in other.types] == [
                plan.program.participants(t) for t in i.types
            ]


def test_a_tensor_of_a_stage_may_be_in_another():
    """In micro-batches: a stage's operators up to it, or from it on, go to the next stage."""
    plan, found = planned("pipeline"), explain("pipeline", "gelu")
    mine, others = found.placement.partition("@")[2], dict(plan.program.ratios)
    del others[mine]
    moved = {a.placement.partition("@")[2]: a for a in found.alternatives if not a.placement.endswith(mine)}
    assert set(moved) == {n for n in others if n in ratio_names(plan.program)}
    for name, a in moved.items():
        t = a.program.types["gelu"]
        assert a.program.participants(t) == support(plan.program.ratio_of[name])
        in_steps = not any(text.startswith(a.placement) for text in found.notes)
        if in_steps:
            micro_batches = plan.micro_batches
            costs = CostModel(cluster_of("pipeline"))
            assert a.step_s == simulate(a.program, costs, micro_batches=micro_batches).step_s
    assert any(a.placement not in "".join(found.notes) for a in moved.values())


def ratio_names(program) -> set[str]:
    used = set(ratios_of(program).values())
    return {name for name, ratio in program.ratios if ratio in used}


def test_alternatives_within_a_stage():
    """Of a stage of several ranks; what other stages do stays."""
    plan, found = planned("pipeline"), explain("pipeline", "gelu")
    here = found.placement.partition("@")[2]
    cut = next(a for a in found.alternatives if a.placement == f"S(2)@{here}")
    for i in plan.program.instructions:
        if i.is_leaf or i.is_redistribution or plan.program.types[i.results[0]].ratio in (here, None):
            continue
        assert cut.program.producers[i.results[0]].type.placement == i.type.placement


def test_micro_steps_are_kept_where_they_can_be():
    plan, stored, cut = (
        planned("in micro-batches"),
        explain("in micro-batches", "layers.1.up.weight"),
        explain("in micro-batches", "gelu"),
    )
    costs = CostModel(cluster_of("in micro-batches"))
    for a in stored.alternatives:
        if a.program is not None:
            assert not any(text.startswith(a.placement) for text in stored.notes)
            assert a.step_s == simulate(a.program, costs, micro_batches=plan.micro_batches).step_s
            assert regions(a.program)
    # a hidden dim that is cut needs the samples of all ranks and micro-batches
    assert {text[:4] for text in cut.notes if "micro-batches cannot run" in text} >= {"S(1)", "S(2)"}


# --- machines ---------------------------------------------------------------------------------------------


def test_split_and_joined_again_a_program_is_what_it_was():
    plan = plan_traced(traced()[2], cluster_of("two-level"), planner="two-level")
    sets, wholes = split(plan.program)
    again = join(plan.program.name, sets, wholes)
    assert join(again.name, *split(again)) == again
    assert {i.results: i.types for i in again.instructions} == {
        i.results: i.types for i in plan.program.instructions
    }


def test_a_value_of_one_machine_is_asked_about_there():
    plan = planned("two-level")
    program = plan.program
    in_both, in_one = explain("two-level", "gelu"), explain("two-level", "%gelu.m1")
    assert in_both.tensors == ("gelu",) and in_one.tensors == ("gelu.m1",)
    assert {i.result for i in in_both.used} >= {"gelu.m1"} and in_both.maker.result == "gelu.m0"
    assert all(a.placement.endswith("@m1") for a in in_one.alternatives)
    kept = program.types["gelu.m0"].placement
    for a in in_one.alternatives:
        if a.program is not None and not a.is_plan:
            assert a.program.types["gelu.m0"].placement == kept
            assert a.program.types["gelu.m1"].placement != program.types["gelu.m1"].placement
    both = {a.placement: a.program for a in in_both.alternatives if a.program is not None}
    types = both["S(0)"].types
    assert str(types["gelu.m0"].placement) == str(types["gelu.m1"].placement) == "S(0)"


def test_machines_that_hold_a_tensor_in_different_ways():
    """One of them has one device, where nothing can be cut."""
    lines = CLUSTER.split("\n")
    at = next(n for n, line in enumerate(lines) if line.startswith("devices"))
    lines[at] = lines[at].partition(",\n")[0].partition("}, {")[0] + "}]"
    cluster = Cluster.parse("\n".join(lines))
    plan = plan_traced(traced()[2], cluster, planner="two-level")
    program = plan.program
    cut = next(i for i in program.params if isinstance(i.type.placement, Shard))
    found = explain_tensor(plan, cluster, cut.args[0])
    assert found.placement == found.own.placement == f"R@m0, {str(cut.type.placement)[:4]}@m1"
    assert "R" in {a.placement for a in found.alternatives}


# --- the command ------------------------------------------------------------------------------------------


def test_gradients_are_summed_as_in_the_plan():
    """By levels, if the plan says so; a baseline's are not."""
    devices = CLUSTER.replace("bandwidth_gbit_per_s = 1", "bandwidth_gbit_per_s = 0.01")
    cluster = Cluster.parse(devices.replace("link_latency_us", "link_gbit_per_s = 100\nlink_latency_us"))
    for planner in ("hap", "ddp-proportional"):
        plan = plan_traced(traced()[2], cluster, planner=planner)
        found = explain_tensor(plan, cluster, "layers.1.up.weight")
        assert planner == "hap" or plan.program.levels is None
        assert found.step_s == pytest.approx(plan.predicted_step_s)
        for a in found.alternatives:
            if a.program is not None and planner != "hap":
                assert a.program.levels is None
        said = "summed within machines first" in " ".join(explain_plan(plan, cluster).sentences)
        assert said == (plan.program.levels is not None)


@pytest.mark.parametrize("name", PLANNERS)
def test_a_plan_as_a_whole(name, tmp_path, capsys):
    plan = planned(name)
    seen = explain_plan(plan, cluster_of(name))
    assert seen.step_s == pytest.approx(plan.predicted_step_s)
    ranks = {r for u in seen.units for r in u.ranks}
    assert ranks == {r for ratio in ratios_of(plan.program).values() for r in support(ratio)}
    everything = [i for i in plan.program.instructions if is_computation(i)]
    assert 0 < sum(u.num_operators for u in seen.units) <= len(everything)
    size = job(name)[1]["ids"].shape[0]
    if seen.kind == "machines":
        assert sum(u.samples[0] for u in seen.units) == size
    elif seen.kind != "one program":
        assert all(sum(u.samples) == size for u in seen.units)
    plan.save(tmp_path / "x.plan")
    (tmp_path / "c.toml").write_text(CLUSTER)
    if name not in SMALL:
        command = ["explain", str(tmp_path / "x.plan"), "--cluster", str(tmp_path / "c.toml")]
        assert execute(command) == 0
        out = capsys.readouterr().out
        assert all(u.name in out for u in seen.units) and seen.sentences[0] in out
        assert execute([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["kind"] == seen.kind and len(found["units"]) == len(seen.units)


@pytest.mark.parametrize("name", ("hap", "pipeline", "tensor-parallel"))
def test_what_ifs_of_a_plan_are_for_the_samples_of_its_batch(name):
    """However often ranks compute them: every stage of a pipeline all of them."""
    found = what_if(planned(name), cluster_of(name), None).answers
    assert {a.samples for a in found} == {SAMPLES}


def test_a_program_of_two_levels_is_not_taken_for_the_model():
    """It has the model once for every machine, so nothing else is planned from it."""
    plan, cluster = planned("two-level"), cluster_of("two-level")
    candidate = Candidate("ddp-even", True, 2 * plan.predicted_step_s)
    rivals = facts_of(replace(plan, candidates=(candidate,)), cluster).rivals
    assert [(r.planner, r.fits, r.step_s) for r in rivals] == [("ddp-even", True, candidate.predicted_step_s)]
    with pytest.raises(InputError, match="what-ifs need the model"):
        what_if(plan, cluster, None)
