"""From a seed to a random model."""

from __future__ import annotations

from functools import partial

from . import indices, layers, losses, shapes
from .draft import Draft
from .source import Source, needed

SHAPES = (
    (8, 5), (7, 6), (12, 4), (9, 1), (6, 4, 3), (5, 6, 8), (8, 3, 12), (13, 2, 6), (4, 3, 6, 6),
    (6, 2, 5, 4), (8, 1, 8, 8),
    (16,), (10, 1, 7), (4, 8, 6),
)  # fmt: skip
LINES = (4, 22)


def random_source(seed: int) -> Source:
    """A model of 4 to 22 statements with one to three losses that are summed."""
    d = Draft(seed)
    add_inputs(d)
    wanted = d.rng.randint(*LINES)
    families = (*layers.FAMILIES, *layers.FAMILIES, *shapes.FAMILIES, *indices.FAMILIES)
    while len(d.lines) < wanted:
        if d.rng.random() < 0.06:
            d.propose(d.rng.choice(indices.UPDATES), binds=False)
        else:
            d.propose(d.rng.choice(families))
    source = d.source(add_losses(d))
    # draws are numbered as the graph has them, which is without what nobody needs
    keeps_all = d.rng.random() < 0.2 and "F.dropout" not in str(source)
    return source if keeps_all else needed(source)


def add_inputs(d: Draft) -> None:
    shape = d.rng.choice(SHAPES)
    double = "dtype=torch.float64"
    d.input(f"torch.randn({list(shape)}, {double})")
    if d.rng.random() < 0.6:
        high = d.rng.choice((2, 3, 5, 11))
        size = d.rng.choice((shape[:1], shape[:2], (shape[0], d.size())))
        d.input(f"torch.randint(0, {high}, {list(size)})")
    if d.rng.random() < 0.3:
        d.input(f"torch.randn({list(shape)}, {double}) > 0.2")
    if d.rng.random() < 0.3:
        other = d.rng.choice((shape, shape[::-1], (shape[0], d.size()), (d.size(), shape[-1])))
        d.input(f"torch.randn({list(other)}, {double}) * 0.7")


def add_losses(d: Draft) -> list[str]:
    """Losses of values that depend on a parameter, the last ones most often."""
    made: list[str] = []
    for _ in range(d.rng.choice((1, 1, 2, 3))):
        for _ in range(20):
            x = d.pick(lambda v: v.is_floating_point() and v.ndim > 0)
            name = None if x is None else d.propose(partial(d.rng.choice(losses.FAMILIES), x=x))
            if name is not None and d.values[name].ndim == 0:
                made.append(name)
                break
    if not d.module_has_parameters or not made:
        made.append(d.propose(partial(losses.penalty, x="x0")))
    return made
