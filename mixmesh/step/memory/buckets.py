"""Memory of the buckets of gradients that are copied into one buffer in order to be summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...base.timeline import bucket_name
from ...cost.outline import first_uses
from ...cost.sums import GradientSum, Summed, gradient_sums
from ...lang.ir import NEVER, Program
from .moments import Moment


def bucket_moments(
    program: Program, complete: Mapping[float, Moment], summed: tuple[Summed, ...]
) -> Iterator[Moment]:
    """Yields the moments when buckets of gradients of replicated parameters are copied into one buffer. This
    happens at the first use of the last of their parameters, which the backward pass reaches last.
    ``complete`` comes from ``Liveness``, and ``summed`` is the order of the program's sums."""
    first_use = {program.params[s.place].result: 0 if s.first_use == NEVER else s.first_use for s in summed}
    every_use = first_uses(program) if program.copies else {}
    for bucket in gradient_sums(program, order=summed):
        last = min(first_use[i.result] for i in bucket.params)
        if last not in complete or bucket.owned is not None:
            continue
        event = bucket_name([p.result for p in bucket.params], bucket.ranks if bucket.cells else ())
        if bucket.cells:
            ends = _completed(program, bucket, every_use)
            copied = (_with_copies(program, bucket, complete[n]) for n in ends if n in complete)
            yield from (moment._replace(event=event) for moment in copied)
        elif len(bucket.params) > 1:
            at, cut = complete[last], bucket.params[0].type.cut.whole
            held = {**at.held, cut: at.held.get(cut, 0.0) + bucket.size_bytes}
            yield at._replace(held=held, event=event)


def _completed(program: Program, bucket: GradientSum, first_use: Mapping[str, int]) -> tuple[int, ...]:
    """The points where a bucket of copies is complete, on the ranks of each copy."""
    uses = zip(*([first_use.get(c.result, 0) for c in program.copies[p.args[0]]] for p in bucket.params))
    return tuple(dict.fromkeys(map(min, uses)))


def _with_copies(program: Program, bucket: GradientSum, at: Moment) -> Moment:
    """Adds, on each rank, the buffer of the cells that it sums, whose size is limited by its pieces of the
    parameters."""
    held = dict(at.held)
    for p in bucket.params:
        for copy in program.copies[p.args[0]]:
            held[copy.type.cut] = held.get(copy.type.cut, 0.0) + copy.type.value.size_bytes
    return at._replace(held=held)
