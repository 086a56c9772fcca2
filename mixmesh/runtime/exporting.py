"""Refuses to trace or export a parallel model: the program of one rank is of no use elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import InputError

EXPORT = "torch.export.export, or something that uses it, such as torch.onnx.export"


def check_not_exported(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises InputError if a parallel model is called in order to record what it does."""
    if torch.jit.is_tracing():
        raise exported("torch.jit.trace, or something that uses it, such as torch.onnx.export")
    if torch.compiler.is_exporting():
        raise exported(EXPORT)
    if any(isinstance(x, torch.fx.Proxy) for x in pytree.tree_leaves((args, kwargs))):
        raise exported("torch.fx.symbolic_trace")


def exported(by: str) -> InputError:
    """The error for a parallel model that ``by`` is to record."""
    return InputError(
        "a parallel model cannot be traced or exported: a rank has only its part of the weights and the work",
        expected="the whole model",
        got=f"{by}, of the parallel model",
        hint="with mixmesh.whole(model) as m: ...m...  # on every rank; let rank 0 alone write files",
    )
