"""``python -m tools.rule_table [PART OF A NAME]`` prints the table, each row's text for one example call.

Rows are grouped by their text. Markdown, as it stands in docs/reference/operators.md.
"""

from __future__ import annotations

import sys

from mixmesh.lang.ir import Ref, ValueType
from mixmesh.lang.rules.aten import RULES
from mixmesh.lang.rules.pattern import PatternMismatch
from mixmesh.lang.rules.rule import Call, Rule
from tests.support.rule_samples import SAMPLES, Sample, Spec


def example(op: str, sample: Sample) -> Call:
    """The call of a sample. Torch is asked for the shapes of the results, with inputs of zeros."""
    inputs: list[ValueType] = []

    def name(arg):
        if isinstance(arg, Spec):
            inputs.append(ValueType(arg.dtype, arg.shape))
            return Ref(f"x{len(inputs) - 1}")
        return tuple(map(name, arg)) if isinstance(arg, tuple) else arg

    args = tuple(name(a) for a in sample.args)
    kwargs = tuple((k, name(v)) for k, v in sample.kwargs)
    return Call(op, args, kwargs, tuple(inputs), results(op, sample))


def results(op: str, sample: Sample) -> tuple[ValueType, ...]:
    import torch  # a command for developers: the rules themselves do without

    dtypes = {"f64": torch.float64, "f32": torch.float32, "c128": torch.complex128}
    dtypes |= {"i64": torch.int64, "i32": torch.int32, "bool": torch.bool}
    names = {dtype: n for n, dtype in dtypes.items()}
    namespace, packet, *overload = op.split(".")

    def value(arg):
        if isinstance(arg, Spec):
            if arg.kind == "definite":
                return torch.eye(arg.shape[-1], dtype=dtypes[arg.dtype]).expand(arg.shape)
            return torch.full(arg.shape, arg.low, dtype=dtypes[arg.dtype])
        if isinstance(arg, tuple):
            return [value(a) for a in arg]
        return dtypes[arg.name] if hasattr(arg, "name") else arg

    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload[0] if overload else "default")
    out = target(*map(value, sample.args), **{k: value(v) for k, v in sample.kwargs})
    out = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(ValueType(names[t.dtype], tuple(t.shape)) for t in out)


def row(op: str, rule: Rule) -> tuple[str, str, str]:
    """Text, linear and flops of a row, as cells."""
    try:
        call = example(op, SAMPLES[op][0])
        text, _ = rule.text(call)
        groups = rule.partial_groups(call)
        flops = rule.flops(call) if callable(rule.flops) else rule.flops
    except (AttributeError, PatternMismatch):  # an operator of a library that is not there
        return "(its library is not installed)", "", ""
    together = " or ".join("+".join(map(str, g)) for g in groups)
    return f"`{' '.join(text.split())}`", together, f"`{flops}`" if flops else ""


def table(part: str = "") -> str:
    """The rows whose name holds ``part``; operators with equal rows share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for op, rule in RULES.items():
        if part in op:
            lines.setdefault(row(op, rule), []).append(op.removeprefix("aten."))
    out = ["| operators | rule, for an example call | partial inputs | multiply-adds |", "|---|---|---|---|"]
    out += [f"| {' '.join(ops)} | {' | '.join(cells)} |" for cells, ops in lines.items()]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(*sys.argv[1:2]))
