"""What every row allows for its sample calls, one line per strategy; --update-golden rewrites it."""

import difflib
from pathlib import Path

from rule_proof import make_case, show, units_of

from mixmesh.lang.ir.printing import print_arg
from mixmesh.lang.rules import RULES, strategies
from tests.support.rule_samples import SAMPLES
from tools.rule_table import table

GOLDEN = Path(__file__).parent / "golden.txt"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"
MARK = "<!-- the table: python -m tools.rule_table -->\n"


def test_strategies_are_as_recorded(request):
    now = "".join(line + "\n" for op in RULES for sample in SAMPLES[op] for line in lines_of(op, sample))
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(now)
    was = GOLDEN.read_text()
    diff = difflib.unified_diff(was.splitlines(), now.splitlines(), "golden.txt", "now", lineterm="", n=3)
    assert was == now, "the rules changed; if rightly, run with --update-golden\n" + "\n".join(diff)


def test_the_page_shows_the_table(request):
    head, _, was = PAGE.read_text().partition(MARK)
    now = table()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(head + MARK + now)
    else:
        assert was == now, "docs/reference/operators.md is behind the table; run with --update-golden"


def lines_of(op, sample):
    call = make_case(op, sample).call
    types = iter(call.inputs)
    arguments = [typed(a, types) for a in call.args] + [f"{k}={typed(v, types)}" for k, v in call.kwargs]
    yield f"{op}({', '.join(arguments)}) -> {', '.join(map(str, call.outputs))}"
    for strategy in strategies(RULES[op], call):
        units = units_of(RULES[op], call, strategy)
        note = "".join(f"  {side}[{n}] in units of {u}" for (side, n), u in units.items() if u > 1)
        yield f"  {show(strategy)}{note}"


def typed(arg, types) -> str:
    """An argument as program text, a tensor as its type."""
    if isinstance(arg, tuple):
        return "[" + ", ".join(typed(a, types) for a in arg) + "]"
    text = print_arg(arg)
    return str(next(types)) if text.startswith("%") else text
