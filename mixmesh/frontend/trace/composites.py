"""Decomposes composite operators without a rule."""

from __future__ import annotations

from collections.abc import Container

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.exported_program import _get_decomp_for_cia

from .decompositions import decomposed
from .schema import op_name

MAX_ROUNDS = 4  # composites may consist of composites


def with_known_operators(program: ExportedProgram, known: Container[str]) -> ExportedProgram:
    """Decomposes composite operators that are not ``known``, which would otherwise run whole on every device.
    A composite whose decomposition cannot be traced, because it checks values, stays as it is."""
    refused: set[OpOverload] = set()
    for _ in range(MAX_ROUNDS):
        targets = {n.target for n in program.graph.nodes if n.op == "call_function"} - refused
        table = {
            op: _get_decomp_for_cia(op) for op in targets if _is_composite(op) and op_name(op) not in known
        }
        if not table:
            break
        for op, written in table.items():
            try:
                program = decomposed(program, {op: written})
            except Exception:
                refused.add(op)
    return program


def _is_composite(op: object) -> bool:
    return isinstance(op, OpOverload) and op.namespace == "aten" and op._can_decompose()
