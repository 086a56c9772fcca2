"""The bench of measured layer times, on layers that are drawn from the cost model itself: the measurements
are no part of the repository."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.layer_fit import chosen, fit, fitted_costs, predicted, rows_of
from benchmarks.layer_texts import LAYERS
from benchmarks.layer_times import (
    FILE,
    LAYOUTS,
    Measured,
    cluster_of,
    load,
    predict,
    predict_all,
    program_of,
    score,
)  # fmt: skip
from mixmesh.base.least_squares import bounded_least_squares
from mixmesh.cost.efficiency import efficiency
from mixmesh.errors import InputError
from mixmesh.lang.check import check_program

CARD = "V100-16GB"


def layers(batches=(1, 2), degrees=(1, 2)) -> list[Measured]:
    return [
        Measured("opt-350m", CARD, batch, degree, layer, 1, 1.0, 1.0, 1.0)
        for batch in batches
        for degree in degrees
        for layer in LAYERS
    ]


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("model", LAYOUTS)
def test_layers_are_valid_programs(model, layer, degree):
    program = program_of(model, layer, 2, degree)
    check_program(program)
    assert program.world_size == degree


def test_products_of_a_layer_shrink_by_its_degree():
    """Of a large block nearly all work is in them; what every rank does whole and the sums are left."""
    blocks = [replace(m, micro_batch=8) for m in layers((8,), (1, 2, 4)) if m.layer == "block"]
    one, two, four = (row.forward_s for row in predict_all(blocks))
    assert one / 2 < two < 0.7 * one and two / 2 < four < 0.7 * two


def test_constants_that_the_layers_have_are_found():
    """A card with half of the usual efficiency of products, a slow backward pass and a slow host."""
    plain = cluster_of(CARD, 1).devices[0]
    product, thin, *others = ((*key, efficiency(*key, plain)) for key in rows_of(plain))
    card = replace(
        plain,
        issue_s=60e-6,
        efficiency=tuple(
            (name, dtype, share * usual.share, usual.ramp_s, backward)
            for (name, dtype, usual), share, backward in ((product, 0.5, 1.3), (thin, 0.8, 1.0))
        ),
    )
    drawn = []
    for m in layers():
        row = predict(m, fitted_costs(CARD, m.degree, card))
        drawn.append(replace(m, forward_s=row.forward_s, backward_s=row.backward_s))
    before = abs(predicted(CARD, plain, drawn) - 1).mean()
    fitted = fit(CARD, drawn)
    assert before > 0.15 and abs(predicted(CARD, fitted, drawn) - 1).mean() < 0.03
    assert efficiency(*product[:2], fitted).share == pytest.approx(0.5 * product[2].share, rel=0.1)
    assert others  # rows that keep about their usual shares


def test_a_third_is_chosen_and_always_the_same_one():
    every = layers((1, 2, 4), (1, 2))
    assert chosen(every) == chosen(every) and len(chosen(every)) == len(every) // 3


def test_scores():
    exact = score([(1.0, 1.0, 1), (2.0, 2.0, 3), (3.0, 3.0, 1)])
    assert (exact.num, exact.error, exact.rank, exact.bias) == (5, 0.0, pytest.approx(1.0), 1.0)
    wrong = score([(1.1, 1.0, 1), (0.5, 2.0, 1), (0.4, 4.0, 2)])
    assert wrong.error == pytest.approx((0.1 + 0.75 + 2 * 0.9) / 4) and wrong.rank == pytest.approx(-1.0)


def test_measurements_are_read_by_kind_of_layer(tmp_path):
    times = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [6.0, 7.0, 8.0], [9.0, 9.0, 9.0]]
    models = {"opt-350m": {"times_s": {CARD: {"2": {"1": times}}}}}
    (tmp_path / FILE).write_text(json.dumps({"models": models}))
    embedding, block, head = load(tmp_path)
    assert (block.layer, block.count, block.forward_s, block.backward_s) == ("block", 2, 5.0, 6.0)
    assert (embedding.count, head.update_s, head.micro_batch, head.degree) == (1, 9.0, 2, 1)
    with pytest.raises(InputError, match="not there"):
        load(tmp_path / "elsewhere")


def test_least_squares_keep_to_their_bounds():
    rng = np.random.default_rng(0)
    matrix, wanted = rng.normal(size=(30, 4)), rng.normal(size=30)
    wide = np.full(4, 100.0)
    free = bounded_least_squares(matrix, wanted, -wide, wide)
    np.testing.assert_allclose(free, np.linalg.lstsq(matrix, wanted, rcond=None)[0], atol=1e-8)
    low, high = free + 0.1, free + 1.0
    bound = bounded_least_squares(matrix, wanted, low, high)
    slope = matrix.T @ (matrix @ bound - wanted)
    assert (bound >= low - 1e-12).all() and (bound <= high + 1e-12).all()
    # the certificate of a minimum over a box: nothing is gained but by leaving it
    for x, g, a, b in zip(bound, slope, low, high):
        assert abs(g) < 1e-6 or (np.isclose(x, a) and g > 0) or (np.isclose(x, b) and g < 0)
