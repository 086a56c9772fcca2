"""The dtypes of PyTorch and their names in program text."""

from __future__ import annotations

import torch

TORCH_DTYPE = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64, "c128": torch.complex128,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
DTYPE_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}
