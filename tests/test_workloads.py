"""The published clusters, models and times: they are what the papers say."""

from __future__ import annotations

import json
import resource

import pytest
import torch

import mixmesh as mm
from benchmarks.papers import cases, measured_links, plan_case, run
from mixmesh.__main__ import execute
from mixmesh.cluster import presets
from mixmesh.cost import CostModel
from mixmesh.errors import ClusterError, InputError, JobError
from mixmesh.frontend.job import Job, load_job
from mixmesh.frontend.job.workloads import WORKLOADS, make
from mixmesh.frontend.job.workloads.language import LanguageModel
from mixmesh.frontend.job.workloads.layers import Layer, MoeLayer
from mixmesh.frontend.trace import trace
from mixmesh.lang.rules import RULES


def expected_parameters(name: str, batch: int) -> float:
    workload = WORKLOADS[name]
    published = workload.published
    if name == "bert-moe":
        published += 36 * (batch // 32)  # HAP: 36 M for the two experts of every device, over all layers
    return published * workload.unit


def parameter_count(job) -> int:
    return sum(p.numel() for p in job.model.parameters())


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_are_the_published_ones(name):
    job = make(f"{name}:256")
    assert all(p.is_meta for p in job.model.parameters())
    assert parameter_count(job) == pytest.approx(expected_parameters(name, 256), rel=0.03)


def test_experts_follow_the_devices():
    few, many = (parameter_count(make(f"bert-moe:{32 * n}")) for n in (8, 64))
    assert many - few == pytest.approx(36 * 2**20 * 56, rel=0.03)


@pytest.mark.parametrize("name", ["vgg19", "vit", "bert-base", "bert-moe", "transformer", "llama-0.5b"])
def test_every_operator_has_a_rule(name):
    job = make(f"{name}:64")
    graph = trace(job.model, job.batch).graph
    assert {n.op for n in graph.nodes if not n.is_leaf} <= set(RULES)


def test_a_large_batch_takes_no_memory():
    job = make("vgg19:64")
    trace(job.model, job.batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = make("vgg19:4096")  # its largest activation is 1 GiB
    trace(job.model, job.batch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_shapes_alone_give_the_graph_of_the_weights():
    shapes, weights = (load_job("workload:transformer:8", weights=w) for w in (False, True))
    assert next(weights.model.parameters()).device.type == "cpu"
    assert trace(*_parts(shapes)).graph.fingerprint == trace(*_parts(weights)).graph.fingerprint


def test_every_process_makes_the_same_weights():
    state = torch.random.get_rng_state()
    one, two = (make("transformer:8", "cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters()))
    assert torch.equal(one.batch["tokens"], two.batch["tokens"])
    assert torch.equal(state, torch.random.get_rng_state())


def _parts(job: Job):
    return job.model, job.batch


def _tiny_moe() -> Job:
    torch.manual_seed(0)
    layers = [Layer(16, 2, 32), MoeLayer(16, 2, 32, experts=4, seq=8)]
    tokens = torch.randint(20, (2, 12, 8))
    return Job(LanguageModel(layers, words=20, seq=8, width=16), {"tokens": tokens[0], "targets": tokens[1]})


def test_experts_compute_what_a_loop_does():
    torch.manual_seed(0)
    layer = MoeLayer(8, 2, 16, experts=4, seq=6, factor=100)  # room for every token
    x = torch.randn(3, 6, 8)
    gates = layer.gate(x).softmax(-1)
    top, index = gates.topk(2, -1)
    top = top / top.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for place in range(2):
        for e in range(4):
            y = torch.relu(x @ layer.up[e]) @ layer.down[e]
            out += torch.where((index[..., place] == e)[..., None], top[..., place, None] * y, 0)
    torch.testing.assert_close(layer.mixture(x), out)


def test_an_expert_takes_no_more_than_its_capacity():
    torch.manual_seed(0)
    layer = MoeLayer(8, 2, 16, experts=4, seq=16, factor=0.5)
    combine = layer.combine(torch.randn(2, 16, 4).softmax(-1))
    assert combine.shape == (2, 16, 4, 2)
    assert ((combine > 0).sum(1) <= 1).all()  # a slot has one token
    assert (combine.sum((2, 3)) <= 1 + 1e-6).all()


def test_experts_on_a_mixed_cluster_equal_one_device():
    job = _tiny_moe()
    device = '{{ name = "{0}", tflop_per_s = {1}, memory_gib = 8, memory_gbyte_per_s = 500 }}'
    text = "[[machine]]\ndevices = [" + device.format("fast", 2) + ", " + device.format("slow", 1) + "]"
    cluster = mm.Cluster.parse(text)
    assert mm.verify(job.model, job.batch, mm.plan(job.model, job.batch, cluster, planner="hap")).ok


@pytest.mark.parametrize("text", ["vgg", "vgg19", "vgg19:0", "vgg19:many", "vgg19:-1", "vgg19:99999999999"])
def test_a_wrong_workload_is_refused(text):
    with pytest.raises(JobError) as error:
        load_job(f"workload:{text}")
    assert "vgg19" in str(error.value)


# --- clusters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_presets_are_what_they_are_called(name):
    cluster = mm.Cluster.load(name)
    assert cluster.name == name
    assert mm.Cluster.parse(cluster.to_toml()) == cluster
    if name[-1].isdigit():
        assert cluster.world_size == int(name.rsplit("-")[-1])


@pytest.mark.parametrize("gpus", [8, 16, 32, 64])
def test_a_quarter_of_hap_is_v100(gpus):
    names = [d.name for d in mm.Cluster.load(f"hap-{gpus}").devices]
    assert names == ["V100-16GB"] * (gpus // 4) + ["P100-12GB"] * (gpus * 3 // 4)


def test_a_file_comes_before_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hap-8").write_text('name = "mine"\n[[machine]]\ndevices = ["T4-16GB"]\n')
    assert mm.Cluster.load("hap-8").name == "mine"
    assert mm.Cluster.load("hap-16").world_size == 16


def test_an_unknown_cluster_lists_the_presets():
    with pytest.raises(ClusterError) as error:
        mm.Cluster.load("hap-33")
    assert all(name in str(error.value) for name in presets())
    assert 'cluster="hap-32"' in error.value.hint


def test_a_workload_is_planned_on_a_preset(tmp_path, capsys):
    plan = str(tmp_path / "vgg.plan")
    assert execute(["plan", "workload:vgg19:512", "--cluster", "hap-8", "--out", plan, "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    (parallel,) = (c for c in made["candidates"] if c["planner"] == "ddp-proportional")
    assert made["planner"] in ("hap", "pipeline")
    assert 5 * made["predicted_step_s"] < parallel["predicted_step_s"]  # as HAP's figures have it
    assert execute(["simulate", plan, "--cluster", "hap-8"]) == 0


# --- the bench -------------------------------------------------------------------------------------------


def test_measured_links_are_those_of_the_artifact():
    cluster = mm.Cluster.load("hap-8")
    cost = CostModel(cluster, measured_links(cluster)).collective("all_reduce", tuple(range(8)))
    assert cost.seconds(476_774_816) == pytest.approx(1, abs=0.01)


@pytest.fixture(scope="module")
def run_once():
    """The bench's ``run``, which plans the same cases only once."""
    rows = {}

    def run_or_recall(chosen, *progress):
        if chosen not in rows:
            rows[chosen] = tuple(run(chosen, *progress))
        return iter(rows[chosen])

    return run_or_recall


def test_papers_beside_ours(tmp_path, capsys, monkeypatch, run_once):
    monkeypatch.setattr("benchmarks.papers.run", run_once)
    out = tmp_path / "deep" / "r.json"
    command = ["bench", "papers", "--model", "vgg19", "--gpus", "8", "--out", str(out)]
    assert execute([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made == json.loads(out.read_text())
    wire, measured = made["rows"]
    assert (wire["links"], measured["links"]) == ("wire", "measured")
    assert wire["published_ddp_even_s"] == 1.24 and wire["published_hap_s"] == 0.20
    assert wire["best_s"] <= min(wire["ddp_even_s"], wire["ddp_proportional_s"])
    assert wire["ddp_even_ratio"] == pytest.approx(wire["ddp_even_s"] / 1.24)
    assert measured["ddp_even_s"] > wire["ddp_even_s"]  # slower links
    by_data_parallelism_s = min(measured["ddp_even_s"], measured["ddp_proportional_s"])
    assert by_data_parallelism_s > 2 * measured["best_s"]  # the paper's headline
    assert measured["speedup"] < by_data_parallelism_s / measured["best_s"]  # one device alone is a bar too
    assert execute(command) == 0
    assert "DP-EV" in capsys.readouterr().out


def test_what_differs_is_marked(run_once):
    (row,) = (r for r in run_once(cases(["vgg19"], [8])) if r.links == "wire")
    assert ("ddp-even" in row.differs) == (abs(row.ddp_even_ratio - 1) > 0.25)


def test_what_does_not_fit_is_no_time():
    published, gpus = cases(["bert-base"], [8])[0]
    job = make("bert-base:16")
    text = '[[machine]]\ndevices = [{ device = "T4-16GB", name = "tiny", memory_gib = 1, count = 2 }]\n'
    row = plan_case(published, gpus, "wire", trace(*_parts(job)), mm.Cluster.parse(text), None)
    assert (row.best_s, row.best_ratio, row.speedup, row.differs) == (None, None, None, ())


@pytest.mark.parametrize("extra", [["--model", "vgg"], ["--gpus", "9"], ["--quick", "--gpus", "8"]])
def test_wrong_cases_are_refused(extra, tmp_path):
    assert execute(["bench", "papers", "--out", str(tmp_path / "r.json"), *extra]) == InputError.exit_status
