"""A job: the user's own file, a function in it, and what that function returns.

job         what it returns                     loading     the file and the function
checks      what is wrong with it               optimizers  its optimizer: states, kernels, what may be cut
workloads   the package's own jobs, the only ones that import torch at once
"""

from .checks import check_job
from .job import WORKLOAD, Job, batch_size, samples_of_data
from .loading import load_job, split_name
from .optimizers import (
    ELEMENTWISE,
    can_be_fused,
    check_supported,
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
    "check_job",
    "check_supported",
    "is_elementwise",
    "load_job",
    "needs_whole_parameters",
    "optimizer_states",
    "samples_of_data",
    "split_name",
]
