"""One device that normalises every rank's samples apart: what a program with local batch norm must equal.

The definition does not depend on how ranks compute: the whole batch is cut into the samples of each rank, and
each piece is normalised by PyTorch's own batch norm. Running statistics are those of the first piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import VerificationError
from ...frontend.trace.build import Builder, rewrite
from ...lang.ir import LOCAL_NORM, Graph, Node, Program, Ref, local_norms, own_samples

Sizes = tuple[int, ...]  # samples that are normalised by themselves, in the order of the batch


def sizes_of_norms(graph: Graph, program: Program) -> list[Sizes]:
    """By local batch norm of the graph, in its order, the samples of each rank in ``program``.

    Raises VerificationError if the program has no such norm, or computes it in several places.
    """
    sizes_of = own_samples(program)
    norms = local_norms(graph.nodes)
    if len(local_norms(program.instructions)) != len(norms) or any(
        n.results[0] not in sizes_of for n in norms
    ):
        raise VerificationError(
            "the program's local batch norms are not those of the model",
            expected=f"each of {len(norms)} once, under the name that it has in the model's trace",
            got=f"{len(local_norms(program.instructions))} of them",
            hint="mixmesh plan JOB --cluster C.toml --batch-norm local",
        )
    return [sizes_of[n.results[0]] for n in norms]


def cut_norms(graph: Graph, sizes: Sequence[Sizes]) -> Graph:
    """The graph with every local batch norm, in order, computed piece by piece."""
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
    """Within it the n-th batch norm in training of every pass of a module treats the pieces of ``sizes[n]``
    apart. Does nothing without sizes.

    Raises VerificationError at the end if a module did not call as many.
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


class _Pieces(TorchFunctionMode):
    def __init__(self, sizes: Sequence[Sizes]) -> None:
        super().__init__()
        self.sizes, self.calls = sizes, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._cut(*args, **kwargs)
        if func is torch.batch_norm:
            x, weight, bias, mean, var, training, momentum, eps, _ = args
            return self._cut(x, mean, var, weight, bias, training, momentum, eps)
        return func(*args, **kwargs)

    def _cut(
        self, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ) -> Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        sizes = self.sizes[self.calls % len(self.sizes)]
        self.calls += 1
        out = []
        for number, piece in enumerate(x.split(sizes)):
            running = (running_mean, running_var)
            if number:  # the first piece's are kept
                running = [None if t is None else t.clone() for t in running]
            out.append(F.batch_norm(piece, *running, weight, bias, True, momentum, eps))
        return torch.cat(out)
