"""Running a logical graph on real tensors, one PyTorch operator per node: the reference for ``trace``."""

from __future__ import annotations

import torch

from mixmesh.frontend.trace import TORCH_DTYPE, overload
from mixmesh.lang.ir import DType, Graph, Ref


def evaluate(graph: Graph, tensors: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]):
    """The loss, and what updates give to buffers. ``tensors``: parameters and buffers by name."""
    values: dict[str, object] = {}
    updates: dict[str, torch.Tensor] = {}

    def value(arg):
        match arg:
            case Ref():
                return values[arg.name]
            case DType():
                return TORCH_DTYPE[arg.name]
            case tuple():
                return [value(a) for a in arg]
        return arg

    for node in graph.nodes:
        args = [value(a) for a in node.args]
        match node.op:
            case "param" | "buffer":
                out = tensors[node.args[0]]
            case "input":
                out = inputs[node.args[0]]
            case "const":
                kind = node.types[0]
                out = torch.tensor(args[0], dtype=TORCH_DTYPE[kind.dtype]).reshape(kind.shape)
            case "update":
                updates[args[0]] = args[1].detach()
                continue
            case "aten.view":
                out = torch.reshape(*args)
            case _:
                out = overload(node.op)(*args, **{k: value(v) for k, v in node.kwargs})
        outs = out if isinstance(out, tuple | list) else (out,)
        for name, kind, one in zip(node.results, node.types, outs):
            if name is not None:
                assert tuple(one.shape) == kind.shape and one.dtype == TORCH_DTYPE[kind.dtype], (node, one)
                values[name] = one
    return values[graph.loss], updates
