"""What would change the step most: the changes of a cluster, their answers, and the sentences on them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from mixmesh.__main__ import execute
from mixmesh.cli.what_if import what_if_table
from mixmesh.cluster import Cluster
from mixmesh.cost import Profile
from mixmesh.cost.links import LinkMeasurement
from mixmesh.errors import Infeasible, InputError
from mixmesh.explain.whatif import Change, answers, changes
from mixmesh.explain.whatif.answers import Answer, advice, price_of, ranked
from mixmesh.frontend.job import samples_of_data
from mixmesh.lang.ir import Program
from mixmesh.lang.plan_file import Plan

CLUSTER = """
name = "two boxes"
[network]
bandwidth_gbit_per_s = 1
[[machine]]
name = "new"
price_per_hour = 2
devices = ["RTX4090-24GB", "RTX4090-24GB", "RTX3090-24GB"]
[[machine]]
name = "old"
price_per_hour = 0.5
devices = ["RTX2080Ti-11GB"]
"""


def cluster() -> Cluster:
    return Cluster.parse(CLUSTER)


def change(text: str, swaps: tuple[str, ...] = ()) -> Change:
    (found,) = [c for c in changes(cluster(), swaps) if c.text == text]
    return found


def names(described: Cluster) -> list[list[str]]:
    return [[device.name for device in machine.devices] for machine in described.machines]


# --- changes -----------------------------------------------------------------------------------------------


def test_each_kind_once():
    assert [(c.kind, c.text) for c in changes(cluster())] == [
        ("device", "without one of 2 RTX4090-24GB of new"),
        ("device", "without RTX3090-24GB of new"),
        ("machine", "without machine new (2 RTX4090-24GB, 1 RTX3090-24GB)"),
        ("machine", "without machine old (1 RTX2080Ti-11GB)"),
        ("network", "links between machines 2x as fast"),
        ("network", "10 Gbit/s between machines (now 1)"),
        ("link", "links inside new 2x as fast"),
        ("swap", "RTX4090-24GB instead of one RTX3090-24GB in new"),
        ("swap", "RTX4090-24GB instead of one RTX2080Ti-11GB in old"),
        ("memory", "48 GiB on every RTX4090-24GB"),
        ("memory", "48 GiB on every RTX3090-24GB"),
        ("memory", "22 GiB on every RTX2080Ti-11GB"),
        ("batch", "twice the batch"),
    ]


def test_the_changed_clusters():
    now = cluster()
    assert names(change("without one of 2 RTX4090-24GB of new").cluster)[0] == [
        "RTX4090-24GB", "RTX3090-24GB"
    ]  # fmt: skip
    assert names(change("without machine old (1 RTX2080Ti-11GB)").cluster) == names(now)[:1]
    twice = change("links between machines 2x as fast").cluster
    assert twice.bandwidth_between(0, 3) == 2 * now.bandwidth_between(0, 3)
    assert twice.bandwidth_between(0, 1) == now.bandwidth_between(0, 1)
    card = change("10 Gbit/s between machines (now 1)").cluster
    assert card.bandwidth_between(0, 3) == 1.25e9
    inside = change("links inside new 2x as fast").cluster
    assert inside.bandwidth_between(0, 1) == 2 * now.bandwidth_between(0, 1)
    assert inside.bandwidth_between(0, 3) == now.bandwidth_between(0, 3)
    swapped = change("H100-80GB instead of one RTX4090-24GB in new", ("H100-80GB",)).cluster
    assert names(swapped) == [["H100-80GB", "RTX4090-24GB", "RTX3090-24GB"], ["RTX2080Ti-11GB"]]
    grown = change("22 GiB on every RTX2080Ti-11GB").cluster
    assert [d.memory_bytes // 2**30 for d in grown.devices] == [24, 24, 24, 22]
    assert change("twice the batch").batches == 2


def test_one_machine_has_no_network():
    alone = replace(cluster(), machines=cluster().machines[:1])
    assert not {c.kind for c in changes(alone)} & {"network", "machine"}


def test_the_beginning_of_a_name_is_asked_back():
    with pytest.raises(InputError, match="several devices have this name") as caught:
        changes(cluster(), ("A100",))
    assert caught.value.hint == ("--swap A100-40GB",)


def test_a_name_of_one_device_need_not_be_whole():
    assert changes(cluster(), ("H100",)) == changes(cluster(), ("H100-80GB",))


def test_a_device_that_the_catalogue_lacks():
    with pytest.raises(InputError, match="no such device") as caught:
        changes(cluster(), ["RTX9999"])
    assert "A100-80GB" in str(caught.value)


# --- prices ------------------------------------------------------------------------------------------------


def test_prices_are_kept_and_change_no_plan():
    described = cluster()
    assert price_of(described) == 2.5
    assert Cluster.parse(described.to_toml()) == described
    free = Cluster.parse(CLUSTER.replace("price_per_hour = 2\n", ""))
    assert price_of(free) is None and free.fingerprint == described.fingerprint


# --- answers -----------------------------------------------------------------------------------------------


def answered(step_s: dict[str, float], profile: Profile | None = None) -> list[Answer]:
    """Answers by a planner that takes so long for clusters of these many devices, and seconds to fail."""
    now, asked_profiles = Change("now", "as it is", cluster()), []

    def planned(traced: int, described: Cluster, costs: Profile | None) -> Plan:
        asked_profiles.append(costs)
        key = f"{traced} batch, {described.world_size} devices"
        if key not in step_s:
            raise Infeasible("nothing fits", expected="2 GiB", got="1 GiB")
        return Plan(Program("p", 1, (), (), ""), "hap", step_s[key], (), "")

    asked = [c for c in changes(cluster()) if c.kind in ("device", "machine", "batch")]
    found = list(answers(now, asked, lambda times: times, 8, planned, profile))
    assert all(costs is None or not costs.collectives for costs in asked_profiles)
    return found


def test_ranks_and_sentences():
    found = answered({"1 batch, 4 devices": 1.0, "1 batch, 3 devices": 1.01, "2 batch, 4 devices": 1.5})
    by_text = {a.change.text: a for a in found}
    assert by_text["twice the batch"].speedup(found[0]) == pytest.approx(2 / 1.5)
    alone = by_text["without machine new (2 RTX4090-24GB, 1 RTX3090-24GB)"]
    assert alone.speedup(found[0]) == 0 and alone.sample_price is None
    old = by_text["without machine old (1 RTX2080Ti-11GB)"]
    assert old.sample_price == pytest.approx(2.0 * 1.01 / 8 / 3600)
    assert ranked(found)[0].change.text == "twice the batch" and ranked(found)[-1] is alone
    assert advice(found) == [
        "the largest gain: twice the batch, 1.33x the samples per second",
        "training is as fast without machine old (1 RTX2080Ti-11GB)",
        "the cheapest per sample: twice the batch, 75% of the price now",
    ]


def test_the_price_of_an_epoch_is_that_of_its_samples():
    """By hand: half a second a step of 8 samples is 1 / 16 s a sample; 2.5 an hour for 1600 samples."""
    answer = Answer(Change("now", "as it is", cluster()), 0.5, 8, "hap", 2.5, 1600)
    assert answer.epoch_price == pytest.approx(2.5 / 3600 * 1600 / 16)
    for unknown in ({"price_per_hour": None}, {"epoch_samples": None}, {"step_s": math.inf}):
        assert replace(answer, **unknown).epoch_price is None


def test_samples_of_an_epoch_where_the_data_says_it():
    rows = TensorDataset(torch.arange(11))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    assert samples_of_data(DataLoader(rows, 4)) == 11
    assert samples_of_data(DataLoader(rows, 4, drop_last=True)) == 8
    assert samples_of_data(DataLoader(rows, 4, sampler=RandomSampler(rows, num_samples=6))) == 6
    assert samples_of_data(DataLoader(rows, batch_sampler=BatchSampler(range(11), 4, False))) is None
    assert samples_of_data(DataLoader(Stream(), 2)) is None
    batches = [{"x": torch.ones(5, 2)}, (torch.ones(3),), torch.ones(4)]
    assert samples_of_data(batches) == 12
    assert samples_of_data(iter(batches)) is None is samples_of_data(None)


def test_where_nothing_fits_now():
    found = answered({"1 batch, 3 devices": 1.0})
    assert math.isinf(found[0].step_s)
    assert advice(found) == ["nothing fits; it would with: without one of 2 RTX4090-24GB of new"]
    assert "inf" not in what_if_table(found, ranked(found))


def test_where_nothing_fits_with_any_change():
    found = answered({})
    assert advice(found) == ["nothing fits, with none of these changes", "expected 2 GiB; got 1 GiB"]
    table = what_if_table(found, ranked(found))
    assert "0.00x" not in table and table.count("nothing fits") == len(found)


def test_a_price_that_is_next_to_nothing():
    """Neither is told as nothing: the price of a million samples, and a share of the price now."""
    found = answered({"1 batch, 4 devices": 1e-6, "1 batch, 3 devices": 1e-9})
    assert any(line.endswith("less than 1% of the price now") for line in advice(found))
    assert "0.0000868" in what_if_table(found, ranked(found))  # by hand: 2.5 / 3600 / 8 of 1e-6, a million


def test_links_of_a_profile_do_not_count():
    """They are of links that the change may be about."""
    measured = LinkMeasurement("all_reduce", "", (0, 1), ((1.0, 1.0),))
    answered({"1 batch, 4 devices": 1.0}, Profile({}, (measured,)))


# --- the command -------------------------------------------------------------------------------------------


JOB = """import torch, mixmesh
def job():
    model = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.Flatten(0))
    model.forward = lambda x: torch.nn.Sequential.forward(model, x).square().mean()
    return mixmesh.Job(model, (torch.randn(64, 8),))
"""


def test_the_command(tmp_path, capsys):
    job = tmp_path / "train.py"
    job.write_text(JOB)
    file = tmp_path / "c.toml"
    file.write_text(CLUSTER)
    words = ["what-if", str(job), "--cluster", str(file), "--planner", "ddp-proportional"]
    assert execute([*words, "--only", "machine", "--only", "batch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["kind"] for row in found["changes"]] == ["machine", "machine", "batch"]
    assert found["changes"][2]["samples"] == 2 * found["now"]["samples"] == 128
    assert found["now"]["price_per_million_samples"] > 0 and found["advice"]
    assert found["now"]["price_per_epoch"] is None  # the job has no data
    assert execute([*words, "--only", "machine"]) == 0
    printed = capsys.readouterr().out
    assert "as it is" in printed and "without machine old" in printed and "a million samples" in printed
    assert "an epoch" not in printed
    job.write_text(JOB.replace("8),))", "8),), data=[(torch.randn(64, 8),)] * 10)"))
    assert execute([*words, "--only", "machine", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["now"]
    assert row["price_per_epoch"] == pytest.approx(640 / 1e6 * row["price_per_million_samples"])
    assert execute([*words, "--only", "machine"]) == 0
    assert "an epoch" in capsys.readouterr().out
    file.write_text(CLUSTER.replace("price_per_hour", "# "))
    assert execute([*words, "--only", "machine"]) == 0
    assert "an epoch" not in capsys.readouterr().out
    assert execute([*words, "--only", "colour"]) == 2
    assert "expected" in capsys.readouterr().err
