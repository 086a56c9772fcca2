"""A job: a function in the user's file that returns a model, a batch, an optimizer and data.

job         the returned value                  loading     the file and the function
checks      errors in the returned value        optimizers  its optimizer: states, kernels, cutting
pieces      a trial of an optimizer of the script's own on pieces
workloads   the package's own jobs, the only ones that import torch at once
"""

from .checks import check_job
from .job import WORKLOAD, Job, batch_size, samples_of_data
from .loading import load_job, split_name
from .optimizers import (
    ELEMENTWISE,
    can_be_fused,
    can_step_pieces,
    check_returned,
    check_supported,
    earlier_gradients,
    is_elementwise,
    needs_whole_parameters,
    optimizer_states,
)

__all__ = [
    "ELEMENTWISE",
    "WORKLOAD",
    "Job",
    "batch_size",
    "can_be_fused",
    "can_step_pieces",
    "check_job",
    "check_returned",
    "check_supported",
    "earlier_gradients",
    "is_elementwise",
    "load_job",
    "needs_whole_parameters",
    "optimizer_states",
    "samples_of_data",
    "split_name",
]
