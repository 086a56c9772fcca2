"""Every row of the table is proved by execution; ``pytest tests/rules -k aten.roll`` selects one."""

import pytest
from rule_proof import RATIOS, Refuted, make_case, prove, show, units_of

from mixmesh.rules import RULES, strategies
from mixmesh.rules.samples import SAMPLES


def test_every_row_has_a_sample():
    assert set(SAMPLES) == set(RULES)


@pytest.mark.parametrize("op", RULES)
def test_no_incorrect_strategy(op):
    wrong = []
    for number, sample in enumerate(SAMPLES[op]):
        case = make_case(op, sample)
        for strategy in strategies(RULES[op], case.call):
            for ratio in RATIOS if strategy.is_sharded else RATIOS[:1]:
                try:
                    prove(case, strategy, ratio, units_of(RULES[op], case.call, strategy))
                except Exception as error:
                    what = str(error) if isinstance(error, Refuted) else repr(error)
                    wrong.append(f"sample {number}, {strategy.factor} {show(strategy)}, {ratio}: {what}")
    assert not wrong, "\n" + "\n".join(wrong)
