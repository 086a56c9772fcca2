"""Plain values as JSON and back: the state of schedulers, loaders and random numbers.

Only the types listed in ``encode`` are written, and only these are restored: reading runs no code, unlike
reading a pickle.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..frontend.trace.dtypes import DTYPE_NAME, TORCH_DTYPE

KINDS = "None, bool, int, float, str, bytes, small tensors, and lists, tuples and dicts of these"


def encode(value: Any, where: str) -> Any:
    """A JSON value from which ``decode`` restores ``value``, to the last digit.

    ``where`` names it in an error. Tensors are moved to the CPU; subclasses of dict and tuple become a dict
    or tuple, except that a Counter stays one. Raises InputError for a value of any other kind.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, list):
        return [encode(v, f"{where}[{n}]") for n, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(v, f"{where}[{n}]") for n, v in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {kind: pairs}
    raise InputError(
        f"{where} cannot be kept in a checkpoint",
        expected=KINDS,
        got=f"a value of the type {type(value).__name__}",
        hint="leave it out, or keep what it is made of",
    )


def decode(value: Any) -> Any:
    """Restores the value from the result of ``encode``. Raises ValueError for anything else."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _decode_tensor(value)
    ((kind, inner),) = value.items()
    match kind:
        case "float":
            return float(inner)
        case "bytes":
            return base64.b64decode(inner, validate=True)
        case "tuple":
            return tuple(decode(v) for v in inner)
        case "dict":
            return {decode(k): decode(v) for k, v in inner}
        case "counter":
            return Counter({decode(k): decode(v) for k, v in inner})
    raise ValueError(f"no kind of value is called {kind!r}")


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if type(value) is not Tensor or value.layout is not torch.strided or value.dtype not in DTYPE_NAME:
        raise InputError(
            f"{where} cannot be kept in a checkpoint",
            expected=KINDS,
            got=f"a {type(value).__name__} of {value.dtype}, {value.layout}",
        )
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape, dtype = list(value.shape), DTYPE_NAME[value.dtype]
    return {"tensor": base64.b64encode(data).decode(), "dtype": dtype, "shape": shape}


def _decode_tensor(value: dict[str, Any]) -> Tensor:
    data = bytearray(base64.b64decode(value["tensor"], validate=True))
    dtype = TORCH_DTYPE[value["dtype"]]
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
