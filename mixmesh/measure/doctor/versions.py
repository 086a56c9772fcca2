"""Checks that all ranks have the same versions."""

from __future__ import annotations

import torch

from ...base.files import PACKAGE
from ...base.units import ranks_text
from ...errors import PlanError
from ...runtime.accelerator import backend_version, is_accelerator
from ...runtime.agreement import by_value, outliers
from ...runtime.versions import package_version, python_version
from .cards import driver_version
from .ground import Ground

ABSENT = "not there"
# without a GPU, only the CUDA version for which PyTorch was built is compared
ONLY_WITH_GPU = ("driver", "NCCL")


def version_facts(device: torch.device) -> dict[str, str]:
    """The versions of the software with which this process computes and communicates, by name."""
    has_gpu = is_accelerator(device)
    return {
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else ABSENT),
        "driver": (driver_version() if has_gpu else None) or ABSENT,
        "NCCL": (backend_version(device) if has_gpu else "") or ABSENT,
        "Python": python_version(),
        "mixmesh": package_version(),
    }


def versions(ground: Ground) -> str:
    """Checks that PyTorch, CUDA, the driver, NCCL, Python and mixmesh are the same on all ranks."""
    told = ground.meeting.gather("the comparison of versions", lambda: version_facts(ground.device))
    for name in told[0]:
        ground.columns[name] = [facts[name] for facts in told]
    differing = [name for name, values in ground.columns.items() if name in told[0] and _differ(name, values)]
    if differing:
        raise _refusal(ground, differing)
    return ", ".join(f"{name} {value}" for name, value in told[0].items() if value != ABSENT)


def _differ(name: str, values: list[str]) -> bool:
    there = [value for value in values if value != ABSENT or name not in ONLY_WITH_GPU]
    return len(set(there)) > 1


def _refusal(ground: Ground, differing: list[str]) -> PlanError:
    """The error for the first version that differs; the table of ranks shows all of them."""
    name = differing[0]
    values = ground.columns[name]
    absent = {rank for rank, value in enumerate(values) if value == ABSENT and name in ONLY_WITH_GPU}
    there = [value for rank, value in enumerate(values) if rank not in absent]
    usual = max(dict.fromkeys(there), key=there.count)
    others = outliers([usual if rank in absent else value for rank, value in enumerate(values)])
    groups = by_value({rank: values[rank] for rank in others})
    also = f" (and of {', '.join(differing[1:])})" if differing[1:] else ""
    return PlanError(
        f"the ranks have other versions of {name}{also}",
        expected=f"{name} {usual} on all ranks, as most of them have it",
        got="; ".join(f"{ranks_text(ranks)}: {name} {value}" for value, ranks in groups.items()),
        hint=_hint(name, usual, sorted({ground.hosts[rank] for rank in others} if ground.hosts else ())),
        ranks=others,
    )


def _hint(name: str, wanted: str, hosts: list[str]) -> tuple[str, ...]:
    """The commands that install the right version on these hosts."""
    where = f" (on {', '.join(hosts)})" if hosts else ""
    if name in ("torch", "CUDA", "NCCL"):
        number, _, build = str(wanted if name == "torch" else torch.__version__).partition("+")
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        return (f"pip install torch=={number}{index}{where}",)
    if name == "Python":
        return (f"a virtual environment of Python {wanted}{where}: python{wanted} -m venv .venv",)
    if name == "mixmesh":
        return (f"install the same mixmesh{where}, or copy {PACKAGE} from the first machine",)
    return (f"install the driver {wanted}{where}, then restart the machine",)
