"""Workers of a loader that the collector of cycles finds, as when a script prepares models in turn."""

from __future__ import annotations

import gc
import time

import torch
from torch.utils.data import DataLoader, TensorDataset, _utils

from mixmesh.training.preparation.queues import keep_queues


def test_workers_in_a_cycle_end_at_once(monkeypatch):
    """PyTorch waits for each whose queue is closed: 5 s, or what is set here, much more than an end takes."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 40.0)
    loader = DataLoader(TensorDataset(torch.ones(4)), num_workers=1, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        keep_queues(batches)
        assert len(list(batches)) == 4
    around = [loader]
    around.append(around)
    del batches, loader, around
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < 30


def test_an_iterator_without_workers_stays_as_it_is():
    keep_queues(iter([1]))
