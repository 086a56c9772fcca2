"""Checks that a job's files, its model and its first batches are the same on all ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ...base.files import PACKAGE
from ...errors import InputError
from ...frontend.job import WORKLOAD, load_job, split_name
from ...runtime.agreement import COMPARED_STEPS, check_facts, difference, facts_of_model, outliers
from ...training.preparation.alike import END, digest
from .ground import Ground, count


def job_code(ground: Ground) -> str:
    """Checks that the files from which the job was loaded are the same on all ranks."""

    job_name = ground.asked.job_name
    assert job_name is not None  # otherwise this check is left out

    def make() -> dict[str, str]:
        ground.job = load_job(job_name)
        return {} if job_name.startswith(WORKLOAD) else files_of(split_name(job_name)[0])

    told = ground.meeting.gather_here("the loading of the job", make)
    names = sorted({name for files in told for name in files})
    for name in names:
        digests = [files.get(name, "no such file") for files in told]
        if got := difference(digests):
            raise InputError(
                f"the ranks have other versions of {name}",
                expected="the same files on all machines",
                got=got,
                where=job_name,
                hint="rsync the folder of the job from the first machine to all others",
                ranks=outliers(digests),
            )
    return f"{count(len(names), 'file')} alike" if names else "one of mixmesh's own"


def files_of(path: Path) -> dict[str, str]:
    """For each file that was imported from the folder of a job or below it, its digest, by name."""
    folder = path.resolve().parent
    files = {path.resolve()}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and name.endswith(".py") and "site-packages" not in name:
            files.add(Path(name).resolve())
    # mixmesh's own files are left out: their digest is among the versions
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        for file in sorted(files)
        if file.is_relative_to(folder) and not file.is_relative_to(PACKAGE.resolve()) and file.is_file()
    }


def model(ground: Ground) -> str:
    """Checks that all ranks have made the same model: its parameters, settings and code."""
    told = ground.meeting.gather("the comparison of models", lambda: facts_of_model(ground.job.model))
    check_facts(told)
    size = sum(p.numel() for p in ground.job.model.parameters())
    return f"{type(ground.job.model).__name__} of {size:,} parameters"


def data(ground: Ground) -> str:
    """Checks that the example batch and the first batches of the job's data are the same on all ranks."""

    def make() -> list[str]:
        batches: Iterable[Any] = () if ground.job.data is None else islice(ground.job.data, COMPARED_STEPS)
        digests = [digest(batch) for batch in (ground.job.batch, *batches)]
        return digests + [END] * (1 + COMPARED_STEPS - len(digests))

    told = ground.meeting.gather_here("the comparison of data", make)
    for number, digests in enumerate(zip(*told)):
        if got := difference(digests):
            what = f"batch {number} of the job's data" if number else "the job's batch"
            raise InputError(
                f"{what} is not the same on all ranks",
                expected="the same samples in the same order on all ranks",
                got=got,
                where=ground.asked.job_name or "",
                hint=(
                    "torch.manual_seed(0) first in the job, or a generator with a seed for the loader",
                    "copy the same data files to all machines, and sort what is listed from a folder",
                ),
                ranks=outliers(digests),
            )
    compared = sum(each != END for each in told[0])
    return f"{count(compared, 'batch')} alike"
