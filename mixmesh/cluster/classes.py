"""Names of the classes of operators and of the dtypes for which devices have efficiencies."""

from __future__ import annotations

PRODUCT = "product"
THIN = "thin product"
CONVOLUTION = "convolution"
DEPTHWISE = "depthwise convolution"
ATTENTION = "attention"
ELEMENTWISE = "elementwise"
REDUCTION = "reduction"
LOOKUP = "lookup"
PRODUCTS = (PRODUCT, THIN, CONVOLUTION, DEPTHWISE, ATTENTION)
MEMORY_BOUND = (ELEMENTWISE, REDUCTION, LOOKUP)
F32, TF32, HALF = "f32", "tf32", "half"
ANY = "any"  # dtype of memory-bound operators, whose time depends on bytes only
ROWS = (
    *((name, dtype) for name in PRODUCTS for dtype in (F32, TF32, HALF)),
    *((n, ANY) for n in MEMORY_BOUND),
)
