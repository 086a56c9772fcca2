"""A mixture of experts in one operator, so that its tokens or its experts may be cut.

Models sort the choices of their tokens by expert, so that the rows of every expert are contiguous. The sizes
of these groups are data, so the sorted rows cannot be sharded in advance. With this operator, rows keep the
order of the tokens outside, and are sorted inside, on each rank: it has all experts for some of the tokens,
or some of the experts for all tokens. Every choice of the router is computed: none is dropped or padded.

``body`` describes what an expert computes for its rows, in assignments with the syntax of Python:

    h = x0 @ t0; g, u = split.Tensor(h, 24, -1); a = silu(g); m = mul.Tensor(a, u); y = m @ t1.mT

``x0`` are a token's values, repeated for each of its choices, ``s0`` values of a choice, ``t0`` tables with
an entry per expert, ``w0`` tensors that all rows share, ``d0`` dtypes. ``rows @ t0`` multiplies every row by
the matrix of its expert, ``t0[e]`` is the entry of each row's expert. All other operators are those of ATen
that treat every row by itself. The last value is summed over the choices of each token.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PRODUCT, PRODUCT_OF_TRANSPOSED, ENTRY = "@", "@ mT", "[e]"
NO_FUNCTIONS: Mapping[str, Callable] = MappingProxyType({})


@dataclass(frozen=True)
class Value:
    """A use of a value, by its name."""

    name: str


@dataclass(frozen=True)
class Step:
    """One assignment of a body. ``operator`` is PRODUCT or PRODUCT_OF_TRANSPOSED (of a row value and a
    table), ENTRY (of a table), or the name of an operator of ATen."""

    results: tuple[str, ...]
    operator: str
    arguments: tuple[object, ...]
    options: tuple[tuple[str, object], ...] = ()


# --- the text of a body --------------------------------------------------------------------------------


@cache
def parse_body(text: str) -> tuple[Step, ...]:
    """Reads the steps of a body. Raises RuntimeError for other text."""
    try:
        return tuple(map(_step, ast.parse(text.replace("; ", "\n")).body))
    except (SyntaxError, ValueError, AttributeError) as error:
        raise RuntimeError(f"no body of an operator: {text!r} ({error})") from error


def _step(statement: ast.stmt) -> Step:
    if not isinstance(statement, ast.Assign):
        raise ValueError(f"an assignment is wanted, not {ast.unparse(statement)}")
    (target,) = statement.targets
    results = tuple(map(_name, target.elts if isinstance(target, ast.Tuple) else (target,)))
    match statement.value:
        case ast.BinOp(left, ast.MatMult(), ast.Attribute(table, "mT")):
            return Step(results, PRODUCT_OF_TRANSPOSED, (_argument(left), _argument(table)))
        case ast.BinOp(left, ast.MatMult(), table):
            return Step(results, PRODUCT, (_argument(left), _argument(table)))
        case ast.Subscript(table, ast.Name("e")):
            return Step(results, ENTRY, (_argument(table),))
        case ast.Call(function, arguments, options):
            named = tuple((str(o.arg), _argument(o.value)) for o in options)
            return Step(results, ast.unparse(function), tuple(map(_argument, arguments)), named)
    raise ValueError(f"an operator is wanted, not {ast.unparse(statement.value)}")


def _name(target: ast.expr) -> str:
    if not isinstance(target, ast.Name):
        raise ValueError(f"a name is wanted, not {ast.unparse(target)}")
    return target.id


def _argument(node: ast.expr) -> object:
    match node:
        case ast.Name("inf"):
            return float("inf")
        case ast.Name(name):
            return Value(name)
        case ast.Tuple(items) | ast.List(items):
            return tuple(map(_argument, items))
        case ast.UnaryOp(ast.USub(), ast.Name("inf")):
            return -float("inf")
    return ast.literal_eval(node)


@cache
def _function(name: str) -> Callable:
    stem, *overload = name.split(".")
    return getattr(getattr(torch.ops.aten, stem), overload[0] if overload else "default")


# --- products of rows with their experts' matrices -----------------------------------------------------


class _Product(torch.autograd.Function):
    """Multiplies rows, in consecutive groups of ``counts``, by the matrix of their group. On meta tensors,
    which have no counts, only the shapes are right."""

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


def _groups(counts: Sequence[int] | None, matrices: Tensor, *of_rows: Tensor) -> Iterator[list[Tensor]]:
    """Yields each matrix whose group has rows, with these rows of each other tensor."""
    start = 0
    for matrix, count in zip(matrices, counts or ()):
        if count:
            yield [matrix, *(rows.narrow(0, start, count) for rows in of_rows)]
        start += count


# --- the operator --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Choices sorted by expert: the index of each among all choices, the index of its expert in the tables,
    and the number of choices of each expert (None on meta tensors)."""

    order: Tensor
    experts: Tensor
    counts: tuple[int, ...] | None


def _sort(ids: Tensor, first: int, num_held: int, num_experts: int) -> _Rows:
    """Sorts the choices of ``num_held`` experts from ``first`` on. Raises IndexError for a choice outside of
    the ``num_experts``."""
    if ids.is_meta:
        return _Rows(ids, ids, None)
    # counts are on the host, which slices the rows of each expert
    counts = torch.bincount(ids.clamp(-1, num_experts) + 1, minlength=num_experts + 2).tolist()
    if counts[0] or counts[-1]:
        raise IndexError(f"a token chose an expert that is none of {num_experts}")
    sorted_ids, order = torch.sort(ids, stable=True)
    start = sum(counts[1 : first + 1])
    held = tuple(counts[first + 1 : first + 1 + num_held])
    here = slice(start, start + sum(held))
    return _Rows(order[here], sorted_ids[here] - first, held)


@dataclass(frozen=True)
class Operands:
    """The tensors and dtypes that a body names, with the prefixes x, s, t, w and d."""

    tokens: Sequence[Tensor]
    values: Sequence[Tensor]
    tables: Sequence[Tensor]
    whole: Sequence[Tensor]
    dtypes: Sequence[torch.dtype]

    def by_name(self, rows: _Rows, choices: int) -> dict[str, Any]:
        token_of = rows.order if rows.counts is None else rows.order // choices
        return {
            **{f"x{n}": t.index_select(0, token_of) for n, t in enumerate(self.tokens)},
            **{f"s{n}": t.index_select(0, rows.order) for n, t in enumerate(self.values)},
            **{f"t{n}": t for n, t in enumerate(self.tables)},
            **{f"w{n}": t for n, t in enumerate(self.whole)},
            **{f"d{n}": dtype for n, dtype in enumerate(self.dtypes)},
        }


def run_body(body: str, rows: _Rows, choices: int, operands: Operands) -> Tensor:
    """Computes the last value of ``body`` for each of ``rows``. Raises RuntimeError as ``run_steps``."""
    of_experts: dict[str, Callable] = {
        PRODUCT: lambda x, table: _Product.apply(x, table, rows.counts),
        PRODUCT_OF_TRANSPOSED: lambda x, table: _Product.apply(x, table.mT, rows.counts),
        ENTRY: lambda table: table.index_select(0, rows.experts),
    }
    return run_steps(body, operands.by_name(rows, choices), of_experts)


def run_steps(body: str, named: Mapping[str, Any], own: Mapping[str, Callable] = NO_FUNCTIONS) -> Tensor:
    """Computes the last value of ``body``, from values with the names that it gives them. Functions of its
    own are those in ``own``, all others are ATen's. Raises RuntimeError for a name without a value, and for
    an operator whose number of results is not that of its names."""
    values_by_name = dict(named)
    for step in parse_body(body):
        run = own.get(step.operator) or _function(step.operator)
        try:
            arguments = [_value_of(a, values_by_name) for a in step.arguments]
            options = {k: _value_of(v, values_by_name) for k, v in step.options}
        except KeyError as error:
            raise RuntimeError(f"no value for {error.args[0]} in the body {body!r}") from None
        result = run(*arguments, **options)
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(step.results):
            raise RuntimeError(
                f"{step.operator} in a body makes {len(results)} results, not {', '.join(step.results)}"
            )
        values_by_name.update(zip(step.results, results))
    return values_by_name[parse_body(body)[-1].results[0]]


def _value_of(argument: object, by_name: Mapping[str, Any]) -> Any:
    """The value that an argument of a step stands for. Raises KeyError for an unknown name."""
    # not a function within run_steps: one that calls itself is a cycle, and would keep the values of every
    # step until Python looks for cycles
    match argument:
        case Value(name):
            return by_name[name]
        case tuple():
            return [_value_of(a, by_name) for a in argument]
    return argument


def experts(
    ids: Tensor, tokens: list[Tensor], values: list[Tensor], tables: list[Tensor], whole: list[Tensor],
    dtypes: list[torch.dtype], body: str, kept_bytes: int,
) -> Tensor:  # fmt: skip
    """Runs a mixture of experts: sums what the chosen experts compute for each token of ``tokens`` [T, ...].

    ``ids`` [T * choices] are the chosen experts, those of a token next to each other; ``values`` [T *
    choices, ...], ``tables`` [E, ...]. ``kept_bytes`` are the bytes per choice that the body keeps for its
    gradient; only the memory model reads them. Raises IndexError for an id that is no expert, as PyTorch's
    look-ups do, and RuntimeError for tensors that do not fit together.
    """
    operands = Operands(tokens, values, tables, whole, dtypes)
    return experts_of_part(ids, operands, body, 0, tables[0].shape[0])


def experts_of_part(ids: Tensor, operands: Operands, body: str, first: int, num_experts: int) -> Tensor:
    """The part of ``experts`` that belongs to the experts of ``operands.tables``, which begin at ``first`` of
    all ``num_experts``."""
    tables = operands.tables
    num_tokens, num_choices = operands.tokens[0].shape[0], ids.shape[0]
    if not num_tokens or num_choices % num_tokens:
        raise RuntimeError(f"{num_choices} choices are not as many for each of {num_tokens} tokens")
    if len(lengths := {t.shape[0] for t in tables}) > 1:
        raise RuntimeError(f"tables have different numbers of experts: {sorted(lengths)}")
    choices = num_choices // num_tokens
    rows = _sort(ids, first, tables[0].shape[0], num_experts)
    out = run_body(body, rows, choices, operands)
    # put in order and then summed, as models do: index_add on a GPU sums in random order
    back = out.new_zeros((num_choices, *out.shape[1:])).index_copy(0, rows.order, out)
    return back.view(num_tokens, choices, *out.shape[1:]).sum(1)


def count_kept_bytes(body: str, operands: Operands, num_choices: int) -> int:
    """The bytes per choice that the body keeps for its gradient, measured on meta tensors."""
    groups = operands.tokens, operands.values, operands.tables, operands.whole

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        some = iter(tensors)
        tokens, values, tables, whole = ([next(some) for _ in group] for group in groups)
        ids = torch.empty(num_choices, dtype=torch.int64, device="meta")
        meta = Operands(tokens, values, tables, whole, operands.dtypes)
        return run_body(body, _Rows(ids, ids, None), 1, meta)

    total = bytes_kept_by(compute, [t for group in groups for t in group])
    return -(-total // max(num_choices, 1))


def bytes_kept_by(compute: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> int:
    """The bytes that autograd keeps of a computation, besides the ``tensors`` that it is given. They are
    replaced by meta tensors."""
    with torch.device("meta"), torch.enable_grad():
        leaves = [t.detach().to("meta") for t in tensors]
        for t in leaves:
            if t.is_floating_point():
                t.requires_grad_()
        leaf_storages = {t.untyped_storage()._cdata for t in leaves}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in leaf_storages:
                kept[storage._cdata] = storage
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = compute(leaves)
    total = sum(storage.nbytes() for storage in kept.values())
    del out
    return total


SCHEMAS = (
    (
        "experts(Tensor ids, Tensor[] tokens, Tensor[] values, Tensor[] tables, Tensor[] whole,"
        " ScalarType[] dtypes, str body, int kept_bytes) -> Tensor",
        experts,
    ),
)
