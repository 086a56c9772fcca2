"""The whole weights of a parallel model as one file, for a single device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from errno import EACCES, EISDIR, ENOENT
from pathlib import Path

import torch
from torch import Tensor

from ..base.files import written_whole
from ..errors import InputError, unwritable

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pt", ".pth", ".bin")


def check_file(path: Path) -> None:
    """Raises InputError if weights cannot be written to the file: before the training rather than after
    it."""
    if path.suffix not in SUFFIXES:
        raise InputError(
            "the name of a file of weights says its form",
            expected=" or ".join(SUFFIXES),
            got=str(path),
            hint=f"--save {path.with_suffix(SAFETENSORS)}",
        )
    if path.is_dir():
        number = EISDIR
    elif not path.parent.is_dir():
        number = ENOENT
    elif not os.access(path.parent, os.W_OK):
        number = EACCES
    else:
        return
    raise unwritable("the weights", path, OSError(number, os.strerror(number)))


def save_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes a ``state_dict`` as safetensors or as ``torch.save`` does, depending on the suffix of the name.
    An existing file stays until everything is written. A tensor with two names is written twice in
    safetensors, whose readers have no ties. Raises InputError if the file cannot be written."""
    from safetensors import SafetensorError

    try:
        with written_whole(path) as partial:
            if path.suffix == SAFETENSORS:
                from safetensors.torch import save_file

                own: dict[int, str] = {}
                parts = {
                    name: x.contiguous() if own.setdefault(x.data_ptr(), name) == name else x.clone()
                    for name, x in state.items()
                }
                save_file(parts, partial)
            else:
                torch.save(dict(state), partial)
    # torch.save reports a full disk by a RuntimeError
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(
            "cannot write the weights",
            got=str(error).strip().partition("\n")[0],
            where=str(path),
            hint="--checkpoint DIR, which keeps a training whose end fails",
        ) from error
