"""Rules of factories: any dim of a constant may be cut, if its size is made local."""

from __future__ import annotations

from . import shapes as s
from .rule import Arguments, Call, LocalCall


def factory(call: Call) -> str:
    return " -> " + " ".join(s.names(len(call.outputs[0].shape)))


def factory_like(call: Call) -> str:
    """A new tensor whose size is an argument; only the dtype of the input is read."""
    left = " ".join(f"x{i}!" for i in range(s.rank_of(call)))
    return f"{left} -> " + " ".join(s.names(len(call.outputs[0].shape)))


def local_size(local: LocalCall) -> Arguments:
    return (local.out_shapes[0], *local.call.args[1:]), local.call.kwargs


def local_size_second(local: LocalCall) -> Arguments:
    return (local.call.args[0], local.out_shapes[0], *local.call.args[2:]), local.call.kwargs
