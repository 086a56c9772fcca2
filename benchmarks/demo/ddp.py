"""DistributedDataParallel with clocks around its work, in the form of our own recordings.

A leaf module computes from the start of its forward pass to the start of the next one's, and in the backward
pass from the moment when autograd reaches it. A bucket travels from the moment when DDP hands it over until
its completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixmesh.base.timeline import bucket_name, gradient_name
from mixmesh.runtime.recording import Recorder


class RecordedDDP:
    """``ddp`` is DistributedDataParallel around a model. A hook sums its buckets as DDP itself does, and
    reports to a recorder while there is one."""

    def __init__(self, model: nn.Module, bucket_mb: int) -> None:
        self.ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self._recorder: Recorder | None = None
        self._names = {id(p): name for name, p in model.named_parameters()}
        # DDP compares annotations with classes, but here they are text
        self.ddp.register_comm_hook(None, lambda state, bucket: self._sum(bucket))

    @contextmanager
    def recorded(self, recorder: Recorder) -> Iterator[None]:
        """A context in which everything that this rank computes and communicates is measured."""
        leaves = [(name, m) for name, m in self.ddp.module.named_modules() if not any(m.children())]
        hooks = [m.register_forward_pre_hook(partial(self._begin, name)) for name, m in leaves]
        hooks += [m.register_forward_hook(partial(self._end, name)) for name, m in leaves]
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None
            for hook in hooks:
                hook.remove()

    def _begin(self, name: str, module: nn.Module, inputs: tuple) -> None:
        self._recorder.reach(name)

    def _end(self, name: str, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        recorder = self._recorder
        output.grad_fn.register_prehook(lambda _: recorder.reach(gradient_name(name)))

    def _sum(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket over all ranks."""
        buffer = bucket.buffer()
        arrived = None
        if self._recorder is not None:
            names = [self._names[id(p)] for p in bucket.parameters()]
            arrived = self._recorder.transfer(bucket_name(names), "all_reduce", buffer.nbytes)
            if bucket.is_last():  # all gradients are ready, so only waiting follows
                self._recorder.leave()
        summed = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()

        def end(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            if arrived is not None:
                arrived()
            return done.value()[0]

        return summed.then(end)
