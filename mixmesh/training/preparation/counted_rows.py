"""Tells from the source of a script's line whether it uses a number of rows to weigh or count samples:
``total += loss.item() * x.size(0)`` goes wrong if ``x`` has only this rank's rows while the loss is the whole
batch's. A size that shapes a tensor, as in ``x.view(len(x), -1)``, is right."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

SIZES = frozenset({"size", "__len__", "numel"})
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
_SUMMED = ast.Add, ast.Sub
# functions that convert a number to another type
_OF_NUMBERS = frozenset({"float", "int", "max", "min", "round"})


def counts_samples(frame: FrameType) -> bool:
    """Whether the number that ``frame`` is reading is added to a sum, or weighs a loss. False without source
    code."""
    tree = _parsed(frame.f_code.co_filename)
    place = _place(frame)
    if tree is None or place is None:
        return False
    node = tree.by_place.get(place)
    if node is None:
        return False
    return _counts(node, tree, follows=True)


class _Tree:
    """The source of a file, with the node at each place and the parent of each node."""

    def __init__(self, source: str) -> None:
        self.root = ast.parse(source)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.by_place: dict[tuple[int, int, int, int], ast.expr] = {}
        for node in ast.walk(self.root):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None:
                place = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                self.by_place.setdefault(place, node)

    def function_of(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, _FUNCTIONS):
            node = self.parents[node]
        return node


@lru_cache(maxsize=16)
def _parsed(file: str) -> _Tree | None:
    source = "".join(linecache.getlines(file))
    try:
        return _Tree(source) if source else None
    except SyntaxError:
        return None


def _place(frame: FrameType) -> tuple[int, int, int, int] | None:
    """The lines and columns of the expression that is being evaluated."""
    positions = list(frame.f_code.co_positions())
    line, last_line, column, last_column = positions[frame.f_lasti // 2]
    if line is None or last_line is None or column is None or last_column is None:
        return None
    return line, last_line, column, last_column


def _counts(node: ast.AST, tree: _Tree, *, follows: bool) -> bool:
    """Whether a number goes into a sum, or weighs a loss. If it is assigned to a name first, the uses of the
    name are examined if ``follows`` is set."""
    parent = tree.parents[node]
    while _is_number_still(parent):
        if isinstance(parent, ast.BinOp) and _is_of_loss(
            parent.right if parent.left is node else parent.left
        ):
            return True
        node, parent = parent, tree.parents[parent]
    if isinstance(parent, ast.AugAssign):
        return node is parent.value and isinstance(parent.op, _SUMMED)
    if isinstance(parent, ast.keyword):
        parent = tree.parents[parent]
    if isinstance(parent, ast.Call):  # meter.update(loss.item(), x.size(0))
        return any(_is_of_loss(x) for x in parent.args if x is not node)
    if isinstance(parent, ast.Assign) and follows and isinstance(parent.targets[0], ast.Name):
        uses = _uses(parent.targets[0].id, tree.function_of(parent))
        return any(_counts(use, tree, follows=False) for use in uses)
    return False


def _is_number_still(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _OF_NUMBERS
    return isinstance(node, ast.BinOp | ast.UnaryOp | ast.Subscript)


def _is_of_loss(node: ast.AST) -> bool:
    """Whether an expression is a loss, judging by its name, or a number that was read from a tensor."""
    for inner in ast.walk(node):
        name = inner.id if isinstance(inner, ast.Name) else getattr(inner, "attr", "")
        if "loss" in name.lower() or name == "item":
            return True
    return False


def _uses(name: str, function: ast.AST) -> Iterator[ast.Name]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
