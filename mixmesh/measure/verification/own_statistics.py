"""A device that normalises the samples of each rank on their own: the reference for local batch norm.

It is independent of the ranks' own computations: the whole batch is cut into the samples of each rank, and
PyTorch's own batch norm normalises each piece. The running statistics are those of the first piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import VerificationError
from ...frontend.trace.build import Builder, rewrite
from ...lang.ir import LOCAL_NORM, Graph, Node, Program, Ref, local_norms, own_samples

Sizes = tuple[int, ...]  # numbers of samples that are normalised together, in the order of the batch


def sizes_of_norms(graph: Graph, program: Program) -> list[Sizes]:
    """The samples of each rank of ``program``, for every local batch norm of the graph, in order.

    Raises VerificationError if the program has no such norm, or computes it in several places.
    """
    sizes_of = own_samples(program)
    norms = local_norms(graph.nodes)
    sizes = [sizes_of[name] for n in norms if (name := n.results[0]) in sizes_of and name is not None]
    if not len(local_norms(program.instructions)) == len(norms) == len(sizes):
        raise VerificationError(
            "the program's local batch norms are not those of the model",
            expected=f"each of {len(norms)} once, under the name that it has in the model's trace",
            got=f"{len(local_norms(program.instructions))} of them",
            hint="mixmesh plan JOB --cluster C.toml --batch-norm local",
        )
    return sizes


def cut_norms(graph: Graph, sizes: Sequence[Sizes]) -> Graph:
    """Cuts every local batch norm of a graph into pieces of the sizes given for it, in order."""
    left = iter(sizes)

    def by_pieces(b: Builder, node: Node) -> tuple[Ref | None, ...]:
        data, *others = node.args
        counts = next(left)
        parts = [data] if len(counts) == 1 else b.all("aten.split_with_sizes", data, counts, 0)
        of_parts = [b.all(LOCAL_NORM, part, *others) for part in parts]
        y = of_parts[0][0] if len(of_parts) == 1 else b("aten.cat", tuple(y for y, *_ in of_parts), 0)
        return (y, *of_parts[0][1:])

    return rewrite(graph, {LOCAL_NORM: by_pieces})


@contextmanager
def norms_of_pieces(sizes: Sequence[Sizes]) -> Iterator[None]:
    """A context in which the n-th batch norm of each training pass of a module normalises the pieces of
    ``sizes[n]`` separately. Without sizes it does nothing.

    Raises VerificationError at the end if a module called another number of batch norms.
    """
    if not sizes:
        yield
        return
    mode = _Pieces(sizes)
    with mode:
        yield
    if mode.calls % len(sizes):
        raise VerificationError(
            "the module runs another number of batch norms than its trace",
            expected=f"{len(sizes)} in every pass",
            got=f"{mode.calls} in all passes",
        )


class _Norm(NamedTuple):
    """The arguments of ``torch.nn.functional.batch_norm``."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class _Pieces(TorchFunctionMode):
    def __init__(self, sizes: Sequence[Sizes]) -> None:
        super().__init__()
        self.sizes, self.calls = sizes, 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._cut(_Norm(*args, **kwargs))
        if func is torch.batch_norm:
            x, weight, bias, mean, var, training, momentum, eps, _ = args
            return self._cut(_Norm(x, mean, var, weight, bias, training, momentum, eps))
        return func(*args, **kwargs)

    def _cut(self, norm: _Norm) -> Tensor:
        if not norm.training:
            return F.batch_norm(*norm)
        sizes = self.sizes[self.calls % len(self.sizes)]
        self.calls += 1
        out = []
        for number, piece in enumerate(norm.input.split(sizes)):
            mean, var = norm.running_mean, norm.running_var
            if number:  # only the first piece updates the running statistics
                mean, var = (None if t is None else t.clone() for t in (mean, var))
            out.append(F.batch_norm(*norm._replace(input=piece, running_mean=mean, running_var=var)))
        return torch.cat(out)
