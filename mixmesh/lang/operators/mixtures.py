"""A mixture of experts in one operator, so that its tokens or its experts may be cut.

Models sort the choices of their tokens by expert, so that every expert has its rows in one piece; where a
piece ends is data, and no sharding of the sorted rows is known beforehand. Here the rows stay in the order of
the tokens outside of the operator, and the sorting happens inside, on what a rank has: all experts for some
of the tokens, or some of the experts for all tokens. A token's choice is computed by the expert that the
router gave it, wherever that is: no choice is dropped and none is padded.

``body`` says what an expert does with its rows, in assignments that read as Python:

    h = x0 @ t0; g, u = split.Tensor(h, 24, -1); a = silu(g); m = mul.Tensor(a, u); y = m @ t1.mT

``x0`` are a token's values for each of its choices, ``s0`` values of a choice, ``t0`` tables with an entry
per expert, ``w0`` tensors that all rows share, ``d0`` dtypes. ``rows @ t0`` multiplies every row by its
expert's matrix, ``t0[e]`` is every row's own entry. All else are operators of ATen that treat every row by
itself. The last value is summed over the choices of each token.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PRODUCT, PRODUCT_OF_TRANSPOSED, ENTRY = "@", "@ mT", "[e]"


@dataclass(frozen=True)
class Value:
    """A use of a value by its name."""

    name: str


@dataclass(frozen=True)
class Step:
    """One assignment of a body. ``operator`` is PRODUCT, PRODUCT_OF_TRANSPOSED or ENTRY, of a row value and a
    table or of a table, or an operator of ATen."""

    results: tuple[str, ...]
    operator: str
    arguments: tuple
    options: tuple[tuple[str, object], ...] = ()


# --- the text of a body --------------------------------------------------------------------------------


@cache
def parse_body(text: str) -> tuple[Step, ...]:
    """The steps of a body. Raises RuntimeError for what is no body."""
    try:
        return tuple(map(_step, ast.parse(text.replace("; ", "\n")).body))
    except (SyntaxError, ValueError, AttributeError) as error:
        raise RuntimeError(f"no body of experts: {text!r} ({error})") from error


def _step(statement: ast.stmt) -> Step:
    if not isinstance(statement, ast.Assign):
        raise ValueError(f"an assignment is wanted, not {ast.unparse(statement)}")
    (target,) = statement.targets
    results = tuple(t.id for t in target.elts) if isinstance(target, ast.Tuple) else (target.id,)
    match statement.value:
        case ast.BinOp(left, ast.MatMult(), ast.Attribute(table, "mT")):
            return Step(results, PRODUCT_OF_TRANSPOSED, (_argument(left), _argument(table)))
        case ast.BinOp(left, ast.MatMult(), table):
            return Step(results, PRODUCT, (_argument(left), _argument(table)))
        case ast.Subscript(table, ast.Name("e")):
            return Step(results, ENTRY, (_argument(table),))
        case ast.Call(function, arguments, options):
            named = tuple((o.arg, _argument(o.value)) for o in options)
            return Step(results, ast.unparse(function), tuple(map(_argument, arguments)), named)
    raise ValueError(f"an operator is wanted, not {ast.unparse(statement.value)}")


def _argument(node: ast.expr) -> object:
    match node:
        case ast.Name("inf"):
            return float("inf")
        case ast.Name(name):
            return Value(name)
        case ast.Tuple(items) | ast.List(items):
            return tuple(map(_argument, items))
        case ast.UnaryOp(ast.USub(), operand):
            return -_argument(operand)
    return ast.literal_eval(node)


@cache
def _function(name: str) -> Callable:
    stem, *overload = name.split(".")
    return getattr(getattr(torch.ops.aten, stem), overload[0] if overload else "default")


# --- products of rows with their experts' matrices -----------------------------------------------------


class _Product(torch.autograd.Function):
    """Rows in consecutive groups of ``counts``, each times the matrix of its group. Without counts, on meta
    tensors, only shapes are worked out."""

    @staticmethod
    def forward(ctx, rows, matrices, counts):
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        out = rows.new_empty(len(rows), matrices.shape[-1])
        for matrix, piece, product in _groups(counts, matrices, rows, out):
            torch.mm(piece, matrix, out=product)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        rows, matrices = ctx.saved_tensors
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.empty_like(rows)
            for matrix, piece, product in _groups(ctx.counts, matrices, grad, of_rows):
                torch.mm(piece, matrix.mT, out=product)
        if ctx.needs_input_grad[1]:
            of_matrices = torch.zeros_like(matrices)
            for product, piece, upstream in _groups(ctx.counts, of_matrices, rows, grad):
                torch.mm(piece.mT, upstream, out=product)
        return of_rows, of_matrices, None


def _groups(counts: Sequence[int] | None, matrices: Tensor, *of_rows: Tensor):
    """Each matrix whose group has rows, with its rows."""
    start = 0
    for matrix, count in zip(matrices, counts or ()):
        if count:
            yield (matrix, *(rows.narrow(0, start, count) for rows in of_rows))
        start += count


# --- the operator --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Choices sorted by expert: where each stands among all choices, its expert in the tables, and how many
    choices each expert has (None on meta tensors)."""

    order: Tensor
    experts: Tensor
    counts: tuple[int, ...] | None


def _sort(ids: Tensor, first: int, num_held: int, num_experts: int) -> _Rows:
    """The choices of the experts from ``first`` on. Raises IndexError for a choice of no expert."""
    if ids.is_meta:
        return _Rows(ids, ids, None)
    # counted on the host, as where the rows of an expert end decides what is multiplied
    counts = torch.bincount(ids.clamp(-1, num_experts) + 1, minlength=num_experts + 2).tolist()
    if counts[0] or counts[-1]:
        raise IndexError(f"a token chose an expert that is none of {num_experts}")
    sorted_ids, order = torch.sort(ids, stable=True)
    start = sum(counts[1 : first + 1])
    held = tuple(counts[first + 1 : first + 1 + num_held])
    here = slice(start, start + sum(held))
    return _Rows(order[here], sorted_ids[here] - first, held)


def run_body(
    body: str,
    rows: _Rows,
    choices: int,
    tokens: Sequence[Tensor],
    values: Sequence[Tensor],
    tables: Sequence[Tensor],
    whole: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> Tensor:
    """The last value of ``body`` for each of ``rows``. Raises RuntimeError where a name of the body has no
    value: an argument that is not given, or a result of an operator that makes another number of them."""
    token_of = rows.order if rows.counts is None else rows.order // choices
    values_by_name: dict[str, Tensor | torch.dtype] = {}
    values_by_name |= {f"x{n}": t.index_select(0, token_of) for n, t in enumerate(tokens)}
    values_by_name |= {f"s{n}": t.index_select(0, rows.order) for n, t in enumerate(values)}
    values_by_name |= {f"t{n}": t for n, t in enumerate(tables)}
    values_by_name |= {f"w{n}": t for n, t in enumerate(whole)}
    values_by_name |= {f"d{n}": dtype for n, dtype in enumerate(dtypes)}

    def given(argument):
        match argument:
            case Value(name):
                if name not in values_by_name:
                    raise RuntimeError(f"no value for {name} in the body of experts {body!r}")
                return values_by_name[name]
            case tuple():
                return [given(a) for a in argument]
        return argument

    result = None
    for step in parse_body(body):
        arguments = [given(a) for a in step.arguments]
        if step.operator == PRODUCT:
            result = _Product.apply(*arguments, rows.counts)
        elif step.operator == PRODUCT_OF_TRANSPOSED:
            result = _Product.apply(arguments[0], arguments[1].mT, rows.counts)
        elif step.operator == ENTRY:
            result = arguments[0].index_select(0, rows.experts)
        else:
            result = _function(step.operator)(*arguments, **{k: given(v) for k, v in step.options})
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(step.results):
            raise RuntimeError(
                f"{step.operator} of experts makes {len(results)} results, not {', '.join(step.results)}"
            )
        values_by_name.update(zip(step.results, results))
    return values_by_name[parse_body(body)[-1].results[0]]


def experts(
    ids: Tensor, tokens: list[Tensor], values: list[Tensor], tables: list[Tensor], whole: list[Tensor],
    dtypes: list[torch.dtype], body: str, kept_bytes: int,
) -> Tensor:  # fmt: skip
    """For each token of ``tokens`` [T, ...] the sum over its choices of what the chosen experts make of it.

    ``ids`` [T * choices] are experts, a token's choices in a row; ``values`` [T * choices, ...], ``tables``
    [E, ...]. ``kept_bytes`` is what the body keeps of a choice for its gradient (for the memory model alone).
    Raises IndexError for an id that is no expert, as operators of PyTorch that look up do, and RuntimeError
    for tensors that do not fit together.
    """
    num_experts = tables[0].shape[0]
    return experts_of_part(ids, tokens, values, tables, whole, dtypes, body, 0, num_experts)


def experts_of_part(
    ids: Tensor, tokens: Sequence[Tensor], values: Sequence[Tensor], tables: Sequence[Tensor],
    whole: Sequence[Tensor], dtypes: Sequence[torch.dtype], body: str, first: int, num_experts: int,
) -> Tensor:  # fmt: skip
    """The addend of the experts from ``first`` on, those of ``tables``, to ``experts`` of all
    ``num_experts``."""
    num_tokens, num_choices = tokens[0].shape[0], ids.shape[0]
    if not num_tokens or num_choices % num_tokens:
        raise RuntimeError(f"{num_choices} choices are not as many for each of {num_tokens} tokens")
    if len(lengths := {t.shape[0] for t in tables}) > 1:
        raise RuntimeError(f"tables have different numbers of experts: {sorted(lengths)}")
    choices = num_choices // num_tokens
    rows = _sort(ids, first, tables[0].shape[0], num_experts)
    out = run_body(body, rows, choices, tokens, values, tables, whole, dtypes)
    # in order and then summed, as models do: an index_add of a GPU adds in no order
    back = out.new_zeros((num_choices, *out.shape[1:])).index_copy(0, rows.order, out)
    return back.view(num_tokens, choices, *out.shape[1:]).sum(1)


def count_kept_bytes(
    body: str, tokens: Sequence[Tensor], values: Sequence[Tensor], tables: Sequence[Tensor],
    whole: Sequence[Tensor], dtypes: Sequence[torch.dtype], num_choices: int,
) -> int:  # fmt: skip
    """Bytes per choice that the body keeps for its gradient, by running it on meta tensors."""
    with torch.device("meta"), torch.enable_grad():
        ids = torch.empty(num_choices, dtype=torch.int64)
        leaves = [[t.detach().to("meta") for t in group] for group in (tokens, values, tables, whole)]
        for t in (t for group in leaves for t in group if t.is_floating_point()):
            t.requires_grad_()
        leaf_storages = {t.untyped_storage()._cdata for group in leaves for t in group}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in leaf_storages:
                kept[storage._cdata] = storage
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = run_body(body, _Rows(ids, ids, None), 1, *leaves, dtypes)
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return -(-total // max(num_choices, 1))


SCHEMAS = (
    (
        "experts(Tensor ids, Tensor[] tokens, Tensor[] values, Tensor[] tables, Tensor[] whole,"
        " ScalarType[] dtypes, str body, int kept_bytes) -> Tensor",
        experts,
    ),
)
