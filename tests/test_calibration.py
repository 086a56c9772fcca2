"""Constants of a card out of measured kernels: the fit, the device file, and plans that rest on it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import exp, inf
from pathlib import Path

import numpy as np
import pytest
from small_graphs import GRAPHS, graph
from test_detection import found

from mixmesh.__main__ import execute
from mixmesh.base.least_squares import fit_logs
from mixmesh.cluster import Cluster, Device, Machine
from mixmesh.cluster.classes import ANY, ATTENTION, CONVOLUTION, ELEMENTWISE, F32, HALF, PRODUCT, TF32
from mixmesh.cluster.detection.assemble import assemble, calibrations_of
from mixmesh.cluster.detection.inventory import Inventory
from mixmesh.cluster.detection.links import Links
from mixmesh.cluster.device import catalogue_device
from mixmesh.cluster.device_file import Calibration, Fit
from mixmesh.cluster.devices_folder import VARIABLE, device_file, file_name
from mixmesh.cost import CostModel
from mixmesh.cost.efficiency import Efficiency, efficiency
from mixmesh.cost.peaks import peak_op_s
from mixmesh.errors import ClusterError, InputError, PlanError
from mixmesh.explain.whatif.changes import device_of
from mixmesh.lang.check import check_plan
from mixmesh.lang.plan_file import is_measured
from mixmesh.measure.calibration import check_name
from mixmesh.measure.calibration.fit import (
    fit_device,
    fit_optimizer,
    fits_of,
    pairs,
    passes,
    relative_errors,
    with_row,
)
from mixmesh.measure.calibration.samples import SMALL, Sample, Shape, Timing, groups, linear
from mixmesh.planner import make_plan

RECORDED = Path(__file__).parent / "golden" / "calibration_cpu.json"
V100, A100 = catalogue_device("V100-16GB"), catalogue_device("A100-40GB")
NOISE = 0.03


def drawn(truth: Device, *, noise: float = NOISE) -> list[Timing]:
    """Timings of all samples on a device of these constants, with seeded noise."""
    rng = random.Random(0)
    samples = [s for group in groups(truth, has_half=True) for s in group.samples]
    blank = [Timing(s, 1.0, 1.0) for s in samples]
    times = zip(*passes(truth, blank))
    return [
        Timing(s, ahead * exp(rng.gauss(0, noise)), back * exp(rng.gauss(0, noise)))
        for s, ((ahead, _), (back, _)) in zip(samples, times)
    ]


def with_rows(device: Device, rows: dict[tuple[str, str], Efficiency], **fields: float) -> Device:
    for row, own in rows.items():
        device = with_row(device, row, own)
    return replace(device, sustained=1.0, **fields)


TRUE_ROWS = {
    (PRODUCT, F32): Efficiency(0.5, 8e-6, 1.4),
    (PRODUCT, HALF): Efficiency(0.4, 12e-6, 0.8),
    (ATTENTION, HALF): Efficiency(0.2, 20e-6, 1.2),
    (CONVOLUTION, F32): Efficiency(0.9, 10e-6, 1.0),
    (ELEMENTWISE, ANY): Efficiency(0.6, 5e-6, 1.5),
}


@pytest.mark.parametrize(("card", "dtypes"), [(V100, (F32, HALF)), (A100, (F32, TF32, HALF))])
def test_known_constants_are_found_in_noisy_timings(card, dtypes):
    rows = {**TRUE_ROWS, (PRODUCT, TF32): Efficiency(0.45, 9e-6, 1.3)} if TF32 in dtypes else TRUE_ROWS
    if TF32 in dtypes:  # where convolutions run
        rows = {(n, TF32 if n == CONVOLUTION else d): own for (n, d), own in rows.items()}
        rows[CONVOLUTION, TF32] = Efficiency(0.3, 10e-6, 1.0)
    truth = with_rows(card, rows, issue_s=11e-6, backward_issue_s=7e-6)
    timings = drawn(truth)
    fitted = fit_device(card, timings)
    assert fitted.issue_s == pytest.approx(11e-6, rel=0.05)
    assert fitted.backward_issue_s == pytest.approx(7e-6, rel=0.05)
    for row, true in rows.items():
        own = efficiency(*row, fitted)
        assert own.share == pytest.approx(true.share, rel=0.1), row
        assert own.backward == pytest.approx(true.backward, rel=0.1), row
        assert own.ramp_s == pytest.approx(true.ramp_s, rel=0.4, abs=2e-6), row
    fits = fits_of(fitted, card, timings)
    assert all(fit.mean_error < 2 * NOISE for fit in fits), [f for f in fits if f.mean_error >= 2 * NOISE]
    wrong = [f.datasheet_error for f in fits if (f.kernels, f.dtype) in rows and f.direction == "forward"]
    assert min(wrong) > 2 * NOISE  # the datasheet's constants are others


def test_no_kernel_is_above_the_peaks_of_a_calibrated_card():
    """Bounds of plans rest on peaks: a card with a higher clock than its datasheet's has higher ones."""
    fast = with_rows(V100, {(PRODUCT, F32): Efficiency(1.3, 5e-6), (ELEMENTWISE, ANY): Efficiency(1.1, 2e-6)})
    timings = drawn(fast, noise=0.0)
    fitted = fit_device(V100, timings)
    assert max(row[2] for row in fitted.efficiency) <= 1
    assert fitted.flop_per_s == pytest.approx(1.3 * V100.flop_per_s, rel=0.05)
    assert fitted.memory_bytes_per_s == pytest.approx(1.1 * V100.memory_bytes_per_s, rel=0.05)
    assert max(relative_errors(pairs(fitted, timings))) < 0.1


@pytest.mark.parametrize("backward", [0.3, 1.0])
def test_no_product_is_predicted_faster_than_the_bound(backward):
    fast = with_rows(V100, {(PRODUCT, F32): Efficiency(0.95, 1e-8, backward)}, issue_s=1e-6)
    measured = drawn(fast, noise=0.0)
    timings = [t for t in measured if t.sample.row == (PRODUCT, F32)]
    fitted = fit_device(V100, [*timings, *(t for t in measured if t.sample.kernels == SMALL)])
    assert max(relative_errors(pairs(fitted, timings))) < 0.1
    costs = CostModel(Cluster("one", (Machine("one", (fitted,), 1e9, 1e-6, 1e9),), 1e9, 1e-6))
    for call in (t.sample.call for t in timings):
        time = costs.op(call, 2, 0)
        assert time.forward.at(1.0) + time.backward.at(1.0) >= 0.999 * peak_op_s(call, 2, fitted)


def test_what_was_not_measured_stays_that_of_the_datasheet():
    timings = [t for t in drawn(V100) if t.sample.kernels in (SMALL, ELEMENTWISE)]
    fitted = fit_device(V100, timings)
    assert {row[:2] for row in fitted.efficiency} == {(ELEMENTWISE, ANY)}
    assert efficiency(PRODUCT, F32, fitted) == efficiency(PRODUCT, F32, V100)


def test_the_optimizer_has_its_own_slope_and_none_below_its_traffic():
    measured = [(n * 2**20, 20e-6 + n * 2**20 * 25e-12) for n in (1, 8, 64, 512)]
    own, (fit,) = fit_optimizer(V100, measured)
    assert own.optimizer_s_per_byte == pytest.approx(25e-12, rel=0.01)
    assert (fit.kernels, fit.num) == ("optimizer", 4) and fit.largest_error > fit.mean_error > 0
    faster, _ = fit_optimizer(V100, [(2**20, 1e-9)])
    assert faster.optimizer_s_per_byte == pytest.approx(7 / V100.memory_bytes_per_s, rel=1e-3)
    assert fit_optimizer(V100, []) == (V100, ())


# --- the device file ----------------------------------------------------------------------------------------


def calibration(device: Device = V100, **fields) -> Calibration:
    slow = with_rows(device, {(PRODUCT, F32): Efficiency(0.2, 8e-6, 1.4)}, issue_s=50e-6)
    own = replace(
        slow, backward_issue_s=3e-5, optimizer_s_per_byte=25e-12, context_bytes=450 * 2**20,
        kernel_bytes=123456789, calibrated="2026-11-24",
    )  # fmt: skip
    fits = (Fit(PRODUCT, F32, "backward", 9, 0.0421, 0.11, 0.5),)
    return Calibration(replace(own, **fields), "2026-11-24", "Tesla V100", "2.13.0", 118.2, fits)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MIXMESH_DEVICES", str(tmp_path / "devices"))
    return tmp_path / "devices"


ONE = '[[machine]]\ndevices = ["V100-16GB", "T4-16GB"]\n'


def test_a_device_file_reads_back(folder):
    made = calibration()
    assert Calibration.parse(made.to_toml()) == made
    path = made.save()
    assert path == folder / "V100-16GB.toml" and Calibration.load(path) == made
    read = Cluster.parse(ONE)
    assert read.devices == (made.device, catalogue_device("T4-16GB"))
    assert Cluster.parse(read.to_toml()) == read  # also where the file is not


def test_a_cluster_with_a_calibrated_card_is_another_one(folder, monkeypatch):
    before = Cluster.parse(ONE)
    calibration().save()
    after = Cluster.parse(ONE)
    assert after.fingerprint != before.fingerprint
    calibration(kernel_bytes=1).save()
    assert Cluster.parse(ONE).fingerprint not in (before.fingerprint, after.fingerprint)
    assert "calibrated 2026-11-24" in after.describe() and "calibrated" not in before.describe()
    monkeypatch.setenv("MIXMESH_DEVICES", "none")
    assert Cluster.parse(ONE) == before  # off


def test_the_folder_is_that_of_the_users_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv("MIXMESH_DEVICES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert calibration().save() == tmp_path / "mixmesh" / "devices" / "V100-16GB.toml"
    assert Cluster.parse(ONE).devices[0].calibrated == "2026-11-24"
    monkeypatch.setenv("MIXMESH_DEVICES", "none")
    with pytest.raises(ClusterError, match="no folder of device files"):
        calibration().save()


def test_what_a_cluster_file_says_itself_comes_first(folder):
    calibration().save()
    text = (
        '[[machine]]\ndevices = [{ device = "V100-16GB", name = "a", memory_gib = 12, issue_us = 9, '
        'efficiency = [["attention", "f32", 0.3, 4]] }, '
        '{ device = "V100-16GB", name = "b", tflop_per_s = 9 }, '
        '{ device = "V100-16GB", name = "c", cpu_share = 0.5 }]\n'
    )
    a, b, c = Cluster.parse(text).devices
    assert (a.memory_bytes, a.issue_s, a.backward_issue_s) == (12 * 2**30, 9e-6, 3e-5)
    assert [row[:3] for row in a.efficiency] == [(PRODUCT, F32, 0.2), (ATTENTION, F32, 0.3)]
    assert not b.calibrated and not b.efficiency and b.flop_per_s == 9e12
    assert not c.calibrated and c.kind == "cpu"


def test_a_device_that_the_catalogue_lacks_has_the_name_of_its_file(folder):
    own = replace(V100, name="Quadro X/2", sustained=1.0)
    path = calibration(own).save()
    assert path.name == "Quadro X-2.toml"
    read = Cluster.parse('[[machine]]\ndevices = ["Quadro X/2"]\n').devices[0]
    assert read == calibration(own).device
    assert device_of("Quadro X/2") == read  # for mixmesh what-if --swap
    with pytest.raises(ClusterError, match="unknown device") as error:
        Cluster.parse('[[machine]]\ndevices = ["Quadro X/3"]\n')
    assert "Quadro X" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message", "where"),
    [
        ("issue_us = 50", "issue_us = -1", "issue_us is not usable", "figures.issue_us"),
        ("issue_us = 50", "issue_su = 50", 'unknown key "issue_su"', "figures.issue_su"),
        ("[figures]", "[figure]", "unknown key", "figure"),
        ('["product", "f32", 0.2', '["product", "f32", 7', "is not usable", "figures.efficiency[0]"),
        ('direction = "backward"', 'direction = "up"', "is not usable", "fit[0].direction"),
        ("largest_error = 0.11", "largest = 0.11", "unknown key", "fit[0].largest"),
        ("seconds = 118.2", "", "measured.seconds is missing", "measured.seconds"),
        ('name = "V100-16GB"', 'device = "V100-16GB"', "does not say which device", "figures"),
        ('name = "V100-16GB"', 'name = "H100-80GB"', "name of another device", ""),
        ("issue_us = 50", "issue_us = ", "not valid TOML", "line"),
    ],
)
def test_device_files_that_are_refused(folder, old, new, message, where):
    path = calibration().save()
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(ClusterError, match=message.replace("[", r"\[")) as error:
        Cluster.parse(ONE)
    assert where in error.value.where and str(path) in error.value.where
    assert error.value.expected


# --- plans --------------------------------------------------------------------------------------------------


def test_plans_rest_on_the_calibration_where_there_is_one(folder):
    model = graph(GRAPHS["mlp"], 256)
    before = make_plan(model, Cluster.parse(ONE), planner="ddp-even")
    assert before.cost_source == "roofline"
    calibration().save()
    mixed = make_plan(model, Cluster.parse(ONE), planner="ddp-even")
    assert mixed.cost_source == "calibration and roofline" and not is_measured("profile and calibration")
    assert mixed.predicted_step_s > before.predicted_step_s  # a slower host and slower products
    assert mixed.cluster_fingerprint != before.cluster_fingerprint
    alone = make_plan(model, Cluster.parse('[[machine]]\ndevices = ["V100-16GB"]\n'), planner="ddp-even")
    assert alone.cost_source == "calibration"


def test_a_plan_from_before_a_calibration_is_refused_with_what_to_do(folder):
    plan = make_plan(graph(GRAPHS["mlp"], 256), Cluster.parse(ONE), planner="ddp-even")
    check_plan(plan, Cluster.parse(ONE))
    calibration().save()
    with pytest.raises(PlanError, match="another cluster") as error:
        check_plan(plan, Cluster.parse(ONE))
    assert "MIXMESH_DEVICES=none" in error.value.hint[-1] and "V100-16GB" in error.value.hint[-1]


def test_costs_are_those_of_the_file(folder):
    calibration().save()
    one = Cluster.parse('[[machine]]\ndevices = ["V100-16GB"]\n')
    costs = CostModel(one)
    (card,) = one.devices
    assert costs.issue_s(card) == 50e-6 and costs.backward_issue_s(card) == 3e-5
    assert costs.optimizer_s(0, 2**20) == pytest.approx(25e-12 * 2**20)
    idle, working = (costs.memory_constant_bytes(0, idle=idle) for idle in (True, False))
    assert (idle, working - idle) == (450 * 2**20, 123456789)
    large = Sample(PRODUCT, F32, "f32", linear(4096, 4096, 4096))
    ahead, back = passes(card, [Timing(large, 1.0, 1.0)])
    work_s = 2 * 4096**3 / (0.2 * V100.flop_per_s)
    assert ahead[0][0] == pytest.approx(work_s + 8e-6)
    assert back[0][0] == pytest.approx(2 * (1.4 * 1.1 * work_s + 8e-6))


def test_detected_cards_have_their_calibration(folder):
    cards = found("a", "gpu", "Tesla V100-SXM2-16GB", 15.8), found("a", "gpu", "Tesla T4", 14.6)
    inventory = Inventory(cards)
    assert calibrations_of(inventory) == {}
    calibration().save()
    own = calibrations_of(inventory)
    assert list(own) == ["V100-16GB"]
    links = Links({}, {})
    card, other = assemble(inventory, (None, None), links, own).devices
    assert replace(card, memory_bytes=V100.memory_bytes) == calibration().device
    assert card.memory_bytes < V100.memory_bytes  # what is there
    plain = assemble(inventory, (None, None), links).devices
    assert plain[1] == other and not plain[0].calibrated and plain[0].efficiency == ()


# --- measuring ----------------------------------------------------------------------------------------------


def recorded() -> tuple[Device, list[Timing]]:
    """A device without a calibration, and its timings, of ``mixmesh calibrate --device cpu --json``."""
    record = json.loads(RECORDED.read_text())
    sheet = record["datasheet"]
    plain = Device(**{**sheet, "efficiency": tuple(map(tuple, sheet["efficiency"]))})
    return plain, [timing(t) for t in record["timings"]]


def timing(t: dict) -> Timing:
    shape = t["sample"]["shape"]
    inputs = tuple((name, tuple(size)) for name, size in shape["inputs"])
    own = Shape(shape["op"], inputs, tuple(shape["output"]), tuple(shape["ids"]))
    return Timing(Sample(**{**t["sample"], "shape": own}), t["forward_s"], t["backward_s"])


@pytest.mark.parametrize("offset", [0, 1])
def test_recorded_kernels_that_were_held_out_are_nearer_than_by_the_datasheet(offset):
    """Every other kernel of each class is fitted, and the rest predicted. Products alone: on a CPU kernels
    bound by memory are no line of the bytes, as the small ones are in its caches."""
    plain, timings = recorded()
    rows = {t.sample.row: [u for u in timings if u.sample.row == t.sample.row] for t in timings}
    known = [t for own in rows.values() for t in own[offset::2]]
    rest = [t for own in rows.values() for t in own[1 - offset :: 2]]
    fitted = fit_device(plain, known)
    for classes, most in (((PRODUCT,), 0.2), ((PRODUCT, ATTENTION, CONVOLUTION), 0.6)):
        held = [t for t in rest if t.sample.kernels in classes]
        own, datasheet = (relative_errors(pairs(device, held)) for device in (fitted, plain))
        assert len(held) > 2 and sum(own) < most * sum(datasheet), (classes, sum(own), sum(datasheet))


def test_a_cpu_is_calibrated_for_real(folder, capsys):
    """Which kernels it gets to in so short a time depends on how busy the machine is; a file it writes."""
    assert execute(["calibrate", "--device", "cpu", "--seconds", "5", "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out.splitlines()[-1])
    made = Calibration.load(told["out"])
    assert Path(told["out"]) == folder / "cpu.toml" and made.device.kind == "cpu"
    assert made.device.issue_s and made.fits and told["timings"]
    assert all(0 < t["forward_s"] < inf for t in told["timings"])
    assert "small kernels: " in said.err and "optimizer:" in said.err
    one = Cluster.parse('[[machine]]\ndevices = ["cpu"]\n')
    (read,) = one.devices
    assert read == made.device and CostModel(one).source == "calibration"


def test_it_says_what_cannot_be_measured(folder, tmp_path):
    assert execute(["calibrate", "--device", "cpu", "--out", str(tmp_path / "no" / "x.toml")]) == 2
    with pytest.raises(InputError, match="not the card of that name"):
        check_name("A100-40GB")


@pytest.mark.parametrize("name", ["[" * 3000, "é" * 200, "a\0b"])
def test_names_that_no_file_can_have(name, tmp_path, monkeypatch):
    """A cluster file may name any device; where it is not known, that is what is said."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert device_file(name) is None
    assert file_name(name) != file_name(name + "x")
    (tmp_path / file_name(name)).write_text("")
    assert device_file(name) == tmp_path / file_name(name)


def test_a_fit_does_not_step_over_its_minimum():
    """A Gauss-Newton step from where a function is flat leads far away, as measured H100 kernels showed."""
    low, high = np.full(1, -1e3), np.full(1, 1e3)
    found = fit_logs(lambda logs: np.arctan(logs - 3.0), low, high, weight=1e-6, steps=12)
    assert found == pytest.approx([3.0], abs=1e-3)
