"""Rows are proved on calls of other sizes too: each size of a sample in turn is 1, and each number in its
arguments as large as a dim. A window may then be all there is, a leading factor 1, an index short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from guesses import InChild
from rule_proof import RATIOS, make_case, prove, show, units_of

from mixmesh.lang.rules import RULES, strategies
from tests.support.rule_samples import SAMPLES, Sample, Spec

# PyTorch takes weights and numbers that mean nothing to these, and reads beyond the ends of some
UNCHECKED = {
    f"aten.{op}"
    for op in """
    lstm.input gru.input rnn_tanh.input rnn_relu.input lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    native_batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _weight_norm
    _weight_norm_interface ctc_loss.Tensor grid_sampler grid_sampler_2d soft_margin_loss
    """.split()
} | {"mixmesh.local_batch_norm"}


def sizes(arg, *, of_tensors: bool) -> set[int]:
    if isinstance(arg, Spec):
        return set(arg.shape) if of_tensors else set()
    if isinstance(arg, tuple):
        return set().union(*(sizes(a, of_tensors=of_tensors) for a in arg))
    return {arg} if type(arg) is int and not of_tensors else set()


def exchanged(arg, old: int, new: int, *, of_tensors: bool):
    if isinstance(arg, Spec):
        return replace(arg, shape=tuple(new if n == old else n for n in arg.shape)) if of_tensors else arg
    if isinstance(arg, tuple):
        return tuple(exchanged(a, old, new, of_tensors=of_tensors) for a in arg)
    return new if type(arg) is int and not of_tensors and arg == old else arg


def variants(sample: Sample) -> Iterator[Sample]:
    of_tensors = sizes(sample.args, of_tensors=True)
    changes = [(n, 1, True) for n in of_tensors]
    changes += [
        (a, b, False) for a in sizes(sample.args, of_tensors=False) if a > 1 for b in of_tensors if b > a
    ]
    for old, new, in_tensors in changes:
        yield replace(sample, args=exchanged(sample.args, old, new, of_tensors=in_tensors))


def wrong(op: str) -> list[str]:
    found = []
    for sample in dict.fromkeys(v for s in SAMPLES[op] for v in variants(s)):
        try:
            case = make_case(op, sample)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue  # no call of this operator
        for strategy in strategies(RULES[op], case.call):
            for ratio in RATIOS[:1] if strategy.is_sharded else ():
                try:
                    prove(case, strategy, ratio, units_of(RULES[op], case.call, strategy))
                except Exception as error:
                    found.append(f"{sample.args}, {strategy.factor} {show(strategy)}, {ratio}: {error!r}")
    return found


wrong_in_child = InChild(wrong)


@pytest.mark.parametrize("op", [op for op in RULES if op not in UNCHECKED])
def test_no_incorrect_strategy(op):
    lines = wrong_in_child(op)
    assert not lines, "\n" + "\n".join(lines)
