"""The table over architectures: three of them whole, and what a row says when something goes wrong."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")

from benchmarks import coverage
from benchmarks.architectures import ARCHITECTURES, FAMILIES, build
from benchmarks.coverage import CLUSTER, HEADER, chosen, cover, markdown
from mixmesh.__main__ import execute
from mixmesh.cluster import Cluster
from mixmesh.errors import InputError
from mixmesh.frontend.trace import trace


def row_of(name: str):
    (architecture,) = chosen([name])
    return cover(architecture, Cluster.parse(CLUSTER), lambda text: None)


@pytest.mark.parametrize("name", ["GPT-2", "BLOOM", "ViT-MAE"])
def test_an_architecture_is_traced_planned_and_equal_to_one_device(name):
    row = row_of(name)
    assert row.ok and row.exports and not row.reason, row
    assert row.devices > 1 and row.without_rule == () and row.error_f64 < 1e-9


def test_names_are_unique_and_every_family_has_some():
    names = [a.name for a in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 40
    assert {a.family for a in ARCHITECTURES} == set(FAMILIES)


def test_models_are_drawn_alike_and_without_chance():
    (bert,) = chosen(["BERT"])
    (model, batch), (again, _) = build(bert), build(bert)
    assert model.training and all((a == b).all() for a, b in zip(model.parameters(), again.parameters()))
    assert model(**batch).loss == model(**batch).loss
    assert not [n.op for n in trace(model, batch).graph.nodes if "dropout" in n.op]


def test_only():
    assert [a.name for a in chosen(["bert", "GPT-2"])] == ["GPT-2", "BERT"]
    assert {a.family for a in chosen(["audio"])} == {"audio"} and len(chosen()) == len(ARCHITECTURES)
    with pytest.raises(InputError) as caught:
        chosen(["GPT2"])
    assert '--only "GPT-2"' in caught.value.hint


def test_a_model_that_is_not_exported_says_why_and_where(capsys, tmp_path):
    out = tmp_path / "coverage.md"
    status = execute(["bench", "coverage", "--only", "Switch Transformers", "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert status == 0 and found["exported"] == 0 and row["verified"] is None
    assert "modeling_switch_transformers.py" in row["reason"] and "\n" not in row["reason"]
    assert row["reason"] in out.read_text() and "| Switch Transformers | no |" in out.read_text()


def test_an_exception_ends_its_row_only(monkeypatch):
    def build(architecture):
        raise ValueError(f"no {architecture.name}\nand more")

    monkeypatch.setattr(coverage, "build", build)
    rows = list(coverage.run(chosen(["GPT-2", "BERT"])))
    assert [r.reason for r in rows] == ["ValueError: no GPT-2", "ValueError: no BERT"]
    assert not any(r.exports or r.ok for r in rows)
    assert markdown(rows, "python -m benchmarks coverage").count("| " + " | ".join(HEADER) + " |") == 2


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError) as caught:
        list(coverage.run(chosen(["GPT-2"])))
    assert "pip install" in caught.value.hint[0]
