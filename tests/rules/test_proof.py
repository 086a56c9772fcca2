"""Every row of the table is proved by execution; ``pytest tests/rules -k aten.roll`` selects one."""

import pytest
from rule_proof import RATIOS, Refuted, make_case, prove, show, units_of

from mixmesh.lang.ir import PARTIAL, REPLICATE, Shard
from mixmesh.lang.rules import RULES, Strategy, strategies
from tests.support.rule_samples import SAMPLES


def test_every_row_has_a_sample():
    assert set(SAMPLES) == set(RULES)


@pytest.mark.parametrize("op", RULES)
def test_no_incorrect_strategy(op):
    wrong = []
    for number, sample in enumerate(SAMPLES[op]):
        case = make_case(op, sample)
        for strategy in strategies(RULES[op], case.call):
            if RULES[op].own and strategy.factor == "n":
                continue  # by definition each rank's own (tests/test_local_batch_norm.py)
            for ratio in RATIOS if strategy.is_sharded else RATIOS[:1]:
                try:
                    prove(case, strategy, ratio, units_of(RULES[op], case.call, strategy))
                except Exception as error:
                    what = str(error) if isinstance(error, Refuted) else repr(error)
                    wrong.append(f"sample {number}, {strategy.factor} {show(strategy)}, {ratio}: {what}")
    assert not wrong, "\n" + "\n".join(wrong)


WRONG = {
    "relu passes no partial sum": ("aten.relu", Strategy("+", (PARTIAL,), (PARTIAL,))),
    "softmax needs its dim whole": ("aten.softmax.int", Strategy("d1", (Shard(1),), (Shard(1),))),
    "a bias is added once": ("aten.linear", Strategy("k", (Shard(2), Shard(1), REPLICATE), (PARTIAL,))),
    "a sum of addends is not replicated": ("aten.sum", Strategy("", (PARTIAL,), (REPLICATE,))),
}


@pytest.mark.parametrize("why", WRONG)
def test_the_proof_refutes(why):
    op, strategy = WRONG[why]
    with pytest.raises(Refuted):
        prove(make_case(op, SAMPLES[op][0]), strategy, RATIOS[0], {})
