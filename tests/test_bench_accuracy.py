"""bench accuracy: what it makes of its cases, and which cases there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import jobs
from benchmarks.accuracy import Case, distinct_plans, drift, regrets, report, settings, summarise
from benchmarks.accuracy_cases import CLUSTERS, SETTINGS, Setting, cluster_of
from mixmesh.cost import Profile
from mixmesh.errors import InputError


def case(planner: str, predicted_s: float, measured_s: float, *, job="gpt", chosen=False, memory=(100, 100)):
    return Case(
        job, "pair", (planner,), chosen, predicted_s, measured_s, (measured_s, measured_s), memory,
        (100, 100), "quota",
    )  # fmt: skip


CASES = (
    case("ddp-even", 1.1, 1.0, memory=(101, 98)),
    case("auto", 0.5, 0.55, chosen=True),
    case("fsdp-even", 0.6, 0.5, memory=(115, 100)),
    case("auto", 2.0, 2.0, job="vgg", chosen=True),
)


def test_errors_are_fractions_of_what_was_measured():
    found = summarise(CASES)
    assert found["cases"] == 4
    assert found["time_mape"] == pytest.approx((0.1 + 1 / 11 + 0.2 + 0) / 4)
    assert found["memory_max_under"] == pytest.approx(0.02)
    assert found["memory_max_over"] == pytest.approx(0.15)


def test_drift_is_of_the_machine_and_not_of_the_prediction():
    assert drift((1.0, 2.0), [(1.1, 2.0), (1.3, 2.0)]) == pytest.approx(1.1)
    slowed = replace(case("auto", 1.0, 1.25), drift=1.25)
    assert slowed.time_error == pytest.approx(-0.2) and slowed.time_error_without_drift == pytest.approx(0)
    assert summarise([slowed])["time_mape_without_drift"] == pytest.approx(0)


def test_correlations():
    found = summarise(CASES)
    assert found["spearman"] == pytest.approx(0.8)  # 4 cases, two neighbours swapped: 1 - 6 * 2 / (4 * 15)
    assert 0.98 < found["pearson"] < 1


def test_regret_is_within_a_job_and_cluster():
    assert regrets(CASES) == pytest.approx({"gpt@pair": 0.1, "vgg@pair": 0.0})
    found = summarise(CASES)
    assert found["mean_regret"] == pytest.approx(0.05) and found["max_regret"] == pytest.approx(0.1)


def test_report_holds_every_case():
    made = report(CASES, "python -m benchmarks accuracy")
    assert len(made["rows"]) == made["cases"] == 4
    assert made["rows"][0]["time_error"] == pytest.approx(0.1)


def test_cases_cover_what_they_should():
    counts = [cluster_of(s).world_size for s in SETTINGS]
    assert {s.job for s in SETTINGS} == {"gpt", "moe", "vgg", "mlp"}
    assert min(counts) == 2 and max(counts) == 5
    for setting in SETTINGS:
        assert sum(d.cpu_share for d in cluster_of(setting).devices) <= 1.4


def test_settings_by_name():
    assert settings(()) == SETTINGS
    assert all(s.job == "vgg" for s in settings(["vgg"])) and len(settings(["vgg"])) == 2
    assert settings(["mlp@pair"]) == (Setting("mlp", "pair"),)
    with pytest.raises(InputError, match="no such case"):
        settings(["bert@pair"])


def test_one_plan_under_all_its_names():
    cluster = cluster_of(Setting("mlp", "pair"))
    found = distinct_plans(Setting("mlp", "pair"), cluster, ("single", "ddp-even", "auto"), Profile({}, ()))
    assert sorted(n for names in found for n in names) == ["auto", "ddp-even", "single"]
    assert len({str(plan.program) for plan in found.values()}) == len(found)


@pytest.mark.parametrize("name", sorted({s.job for s in SETTINGS}))
def test_jobs_compute_a_loss(name):
    made = getattr(jobs, name)()
    few = {k: v[:2] for k, v in made.batch.items()}
    assert made.model(**few).shape == ()
    assert set(CLUSTERS) >= {s.cluster for s in SETTINGS if s.job == name}
