"""Predicted layer times of GPUs, compared with published measurements.

The measurements (Sailor, SOSP'25) are of A100-40GB and V100-16GB cards: forward, backward and update of each
layer of two language models, by micro-batch and tensor-parallel degree. Every layer is built as a program
(``layer_texts``) and costed by the product's own code: the cost model's sheet and collectives.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mixmesh.cluster import Cluster
from mixmesh.cost import CostModel
from mixmesh.cost.placed import Sheet
from mixmesh.errors import InputError
from mixmesh.lang.ir import Program

from .layer_texts import LAYERS, Layout
from .revision import revision

FILE = "opt_gptneo_a100_v100.json"
# from the models' public configurations; judging by its parameters, GPT-Neo's head was measured without its
# product
LAYOUTS = {
    "opt-350m": Layout(1024, 16, 2048, 50272, "relu", has_dropout=False, has_logits=True),
    "gpt-neo-2.7b": Layout(2560, 20, 2048, 50257, "gelu", has_dropout=True, has_logits=False),
}
# NVLink of a card one way, from its datasheet
LINK_GBIT_PER_S = {"A100-40GB": 2400, "V100-16GB": 1200}
DATASHEET, FITTED = "datasheet", "fitted"
# mean absolute relative error over all layers, and Spearman's rank correlation
TARGETS = {DATASHEET: (0.25, 0.97), FITTED: (0.12, 0.0)}


@dataclass(frozen=True)
class Measured:
    """A layer of a model as measured on one device, in seconds. ``count`` is the number of the model's layers
    that it represents; the times are their means."""

    model: str
    device: str
    micro_batch: int
    degree: int
    layer: str
    count: int
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def has_backward(self) -> bool:
        """Whether its backward pass was run. The embedding's was not, because none of its inputs takes a
        gradient from which to start: its file states 3 us at every size."""
        return self.layer != "embedding"


@dataclass(frozen=True)
class Row:
    """A measured layer with its prediction."""

    measured: Measured
    forward_s: float
    backward_s: float
    update_s: float


def load(folder: Path) -> tuple[Measured, ...]:
    """The measurements of the file in ``folder``. Raises InputError if it is not there."""
    path = folder / FILE
    try:
        models = json.loads(path.read_text())["models"]
    except FileNotFoundError:
        raise InputError(
            "the measured layer times are not there",
            expected=f"{FILE}, which is no part of this repository",
            where=str(path),
            hint="python -m benchmarks layer-times --data FOLDER",
        ) from None
    out = []
    for model, facts in models.items():
        for device, by_batch in facts["times_s"].items():
            for batch, by_degree in by_batch.items():
                for degree, layers in by_degree.items():
                    key = (model, device, int(batch), int(degree))
                    out += [Measured(*key, layer, *means) for layer, means in kinds_of(layers)]
    return tuple(out)


def kinds_of(layers: Sequence[Sequence[float]]) -> Iterator[tuple[str, tuple]]:
    """Kind, count and mean seconds of the layers of a model in order: embedding, blocks, head."""
    for kind, times in (("embedding", layers[:1]), ("block", layers[1:-1]), ("head", layers[-1:])):
        yield kind, (len(times), *(statistics.fmean(column) for column in zip(*times)))


def predict(m: Measured, costs: CostModel) -> Row:
    """The prediction of a layer. ``costs`` are those of as many devices as the degree."""
    program = program_of(m.model, m.layer, m.micro_batch, m.degree)
    sheet = Sheet(program, costs)
    forward, backward = sheet.seconds(program, ranks=[0])
    works = [sheet.work_of[n] for n in sorted(sheet.work_of)[:-1]]  # the last adds up the layer's result
    moved = [
        sum(e.seconds(costs) for (_, back), e in sheet.exchanges.items() if e is not None and back == way)
        for way in (False, True)
    ]
    return Row(
        m,
        sum(forward[n][0] for n in works) + moved[0],
        sum(backward[n][0] for n in works) + moved[1],
        sheet.optimizer_s(program)[0],
    )


@lru_cache(maxsize=1024)
def program_of(model: str, layer: str, micro_batch: int, degree: int) -> Program:
    return LAYERS[layer](LAYOUTS[model], micro_batch, degree)


def cluster_of(device: str, degree: int) -> Cluster:
    """Devices of one machine, with NVLink."""
    return Cluster.parse(
        f'name = "layer times"\n[[machine]]\nlink_gbit_per_s = {LINK_GBIT_PER_S[device]}\n'
        f'devices = [{{ device = "{device}", count = {degree} }}]\n'
    )


def predict_all(measured: Sequence[Measured]) -> tuple[Row, ...]:
    """Predictions from datasheets alone. The measured job ran products in TF32 on cards that have it."""
    costs = {(m.device, m.degree): CostModel(cluster_of(m.device, m.degree), tf32=True) for m in measured}
    return tuple(predict(m, costs[m.device, m.degree]) for m in measured)


@dataclass(frozen=True)
class Score:
    """``error``: mean absolute relative error; ``rank``: Spearman's correlation; ``bias``: median of
    predicted over measured."""

    num: int
    error: float
    rank: float
    bias: float


def score(pairs: Sequence[tuple[float, float, int]]) -> Score:
    """The score of (predicted, measured, how often)."""
    predicted, measured, counts = (np.array(column) for column in zip(*pairs))
    predicted, measured = (np.repeat(column, counts) for column in (predicted, measured))
    rank = rank_correlation(predicted, measured)
    ratio = predicted / measured
    return Score(len(ratio), float(np.mean(abs(ratio - 1))), rank, float(np.median(ratio)))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    order = np.sort(values)
    return (np.searchsorted(order, values) + np.searchsorted(order, values, side="right") - 1) / 2


FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
EVERY, ONCE = "every layer", "each kind once"  # how often a kind of layer counts


@dataclass(frozen=True)
class Scores:
    """The scores of one way to predict, of one pass, over all ``weights`` of layers; by kind of layer too."""

    mode: str
    what: str
    weights: str
    layer: str  # "" for all
    score: Score

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if self.layer or self.what == UPDATE or self.weights != EVERY:
            return None
        error, rank = TARGETS[self.mode]
        return self.score.error <= error and self.score.rank > rank


def scores(mode: str, rows: Sequence[Row]) -> Iterator[Scores]:
    """All scores of some rows: of all layers as they stand in the models, of each kind once, and by kind."""
    for what in (FORWARD, BACKWARD, UPDATE):
        mine = [r for r in rows if what != BACKWARD or r.measured.has_backward]
        yield Scores(mode, what, EVERY, "", score([(*pair(r, what), r.measured.count) for r in mine]))
        yield Scores(mode, what, ONCE, "", score([(*pair(r, what), 1) for r in mine]))
        for layer in LAYERS:
            own = [(*pair(r, what), 1) for r in mine if r.measured.layer == layer]
            if len(own) > 1:
                yield Scores(mode, what, ONCE, layer, score(own))


def pair(row: Row, what: str) -> tuple[float, float]:
    """Predicted and measured seconds of a pass."""
    name = f"{what}_s"
    return getattr(row, name), getattr(row.measured, name)


def report(rows: Mapping[str, Sequence[Row]], known: int, devices: Mapping[str, str], command: str) -> dict:
    """The object that ``--json`` prints and the file holds. ``rows`` are by mode, ``known`` is the number of
    measurements to which constants were fitted, ``devices`` the resulting constants, as lines of a cluster
    file."""
    found = [s for mode, some in rows.items() for s in scores(mode, some)]
    return {
        "bench": "layer-times",
        "command": command,
        "revision": revision(),
        "source": "Sailor (SOSP'25), layer times of OPT-350M and GPT-Neo-2.7B on A100-40GB and V100-16GB",
        "fitted_to": known,
        "devices": dict(devices),
        "scores": [{**asdict(s), "met": s.met} for s in found],
        "rows": [
            {"mode": mode, **asdict(r.measured)}
            | {f"predicted_{what}_s": pair(r, what)[0] for what in (FORWARD, BACKWARD, UPDATE)}
            for mode, some in rows.items()
            for r in some
        ],
    }
