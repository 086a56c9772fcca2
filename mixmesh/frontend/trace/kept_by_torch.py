"""Frees what PyTorch keeps of every export until the process ends: the source of each graph, for tracebacks,
and the types of results by the shapes of operands. For a model that is traced again for each length of a
batch, that is a MiB or more each time."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module


@contextmanager
def nothing_kept() -> Iterator[None]:
    """A context for a trace whose graphs do not outlive it."""
    sources = graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for key in sources.keys() - before:
            del sources[key]
            linecache.cache.pop(key, None)
        FakeTensorMode.cache_clear()
