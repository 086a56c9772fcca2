"""Prepares everything from a job, or a script's own model, optimizer and loader, to the first step.

Reading order: ``start`` (detect, profile, plan), ``outside_loss`` (a loss that the script computes),
``loading``, ``own_loader`` and ``own_batches`` (each rank's own rows of every batch), ``drawn`` (notices
noise for these rows), ``resuming`` (continuing in the middle of an epoch), ``script`` (``mixmesh.prepare``).
"""

from __future__ import annotations

from .loading import same_random_numbers, take_random_numbers
from .start import Device, Options, Prepared, plan_again, prepare_job

__all__ = [
    "Device", "Options", "Prepared", "plan_again", "prepare_job", "same_random_numbers",
    "take_random_numbers",
]  # fmt: skip
