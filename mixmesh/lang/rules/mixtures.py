"""The rule of a mixture of experts (``operators.mixtures``)."""

from __future__ import annotations

import re

from .rule import Call

EXPERTS = "mixmesh.experts"
# the arguments after the ids, each a tuple of tensors; after them come dtypes and the body
GROUPS = ("tokens", "values", "tables", "whole")
BODY = 2 + len(GROUPS)


def groups_of(call: Call) -> dict[str, int]:
    """The number of tensors in each group of arguments."""
    return {name: len(call.args[1 + n]) for n, name in enumerate(GROUPS)}


def count_experts(call: Call) -> int:
    """The number of experts of a mixture; ids are less than it."""
    return call.inputs[1 + len(call.args[1]) + len(call.args[2])].shape[0]


def experts(call: Call) -> tuple[str, dict[str, int]]:
    """experts(ids, tokens, values, tables, whole, dtypes, body, kept_bytes): either the tokens may be cut,
    each together with its choices, or the experts, with a partial sum as the result."""
    heads = {"tokens": "t", "values": "(t c)", "tables": "e", "whole": ""}
    terms = ["(t c)"]
    at = 1
    for name, count in groups_of(call).items():
        for n in range(count):
            rank = len(call.inputs[at].shape)
            inner = [f"{name[0]}{name[1]}{n}_{dim}!" for dim in range(1 if heads[name] else 0, rank)]
            terms.append(" ".join([heads[name], *inner] if heads[name] else inner))
            at += 1
    produced = " ".join(["t", *(f"o{dim}!" for dim in range(1, len(call.outputs[0].shape)))])
    choices = call.inputs[0].shape[0] // call.inputs[1].shape[0]
    return f"{', '.join(terms)} -> {produced}", {"c": choices}


def experts_flops(call: Call) -> str:
    """A product with each of the expert's matrices for every choice."""
    matrices = re.findall(r"@ t(\d+)", call.args[BODY])
    return " + ".join(f"t c ta{n}_1 ta{n}_2" for n in matrices)
