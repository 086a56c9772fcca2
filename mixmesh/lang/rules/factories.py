"""Rules of tensors made from arguments: any dim of a constant may be cut, its size made local."""

from __future__ import annotations

from . import shapes as s
from .rule import Call, LocalCall


def factory(call: Call) -> str:
    return " -> " + " ".join(s.names(len(call.outputs[0].shape)))


def factory_like(call: Call) -> str:
    """A new tensor whose size is an argument; the input only lends its dtype."""
    left = " ".join(f"x{i}!" for i in range(s.rank_of(call)))
    return f"{left} -> " + " ".join(s.names(len(call.outputs[0].shape)))


def local_size(local: LocalCall):
    return (local.out_shapes[0], *local.call.args[1:]), local.call.kwargs


def local_size_second(local: LocalCall):
    return (local.call.args[0], local.out_shapes[0], *local.call.args[2:]), local.call.kwargs
