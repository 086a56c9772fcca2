"""Decomposes an exported program in a time that depends only on the operators in it.

Most programs are rewritten one operator at a time (``functional_form``), a few by PyTorch. It marks every
composite operator of every library, some 500, so that those without a decomposition stay whole, which takes
a second. Here only the operators of the program's graphs are marked. Any other operator can appear only
inside a composite that cannot stay whole, and is decomposed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._export.utils import _is_preservable_cia_op
from torch._ops import OpOverload
from torch.export import ExportedProgram, exported_program

from ...base.patch import patched
from .functional import functional_form
from .symbolic import NotSymbolic, has_symbols

COLLECT = "_collect_all_valid_cia_ops"  # PyTorch's function that returns the composites to mark


def decomposed(program: ExportedProgram, table: Mapping[Any, Callable]) -> ExportedProgram:
    """``program.run_decompositions(table)``."""
    rewritten = functional_form(program, table)
    if rewritten is not None:
        return rewritten
    if has_symbols(program):  # PyTorch takes ten times as long with them
        raise NotSymbolic
    # no frame is the model's here; nodes keep the stacks that they have
    with _marks_composites_of(program), patched(fx.config, "do_not_emit_stack_traces", True):
        return program.run_decompositions(dict(table))


@contextmanager
def _marks_composites_of(program: ExportedProgram) -> Iterator[None]:
    if not hasattr(exported_program, COLLECT):  # a later PyTorch marks them in another way
        yield
        return
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    composites = {op for op in targets if isinstance(op, OpOverload) and _is_preservable_cia_op(op)}
    with patched(exported_program, COLLECT, lambda: composites):
        yield
