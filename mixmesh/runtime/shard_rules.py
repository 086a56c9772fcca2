"""The meaning of each PyTorch function on a shard, by name.

A shard stands for the whole tensor. A function that treats every element by itself may run on each rank's
piece. One that reduces to a single number needs the other ranks' pieces. All others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    ELEMENTWISE = "element by element: each rank treats its piece, and the result is a shard"
    REDUCTION = "to one number: the numbers of all ranks' pieces are combined"
    PLAIN = "a question about the piece itself, not about its values"
    SIZE = "a question about sizes: answered for the whole"
    SPECIAL = "treated by a function of its own"
    REFUSED = "needs elements of other ranks"


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    name: str
    in_place: bool = False
    is_list: bool = False


ELEMENTWISE = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bfloat16 bitwise_and
    bitwise_not bitwise_or bitwise_xor bool ceil clamp clamp_max clamp_min clip clone contiguous copysign cos
    cosh cpu cuda data deg2rad detach digamma div divide double empty_like eq erf erfc erfinv exp exp2 expm1
    fill fix float float_power floor floor_divide fmax fmin fmod frac full_like ge greater greater_equal gt
    half heaviside hypot i0 int isclose isfinite isinf isnan isneginf isposinf ldexp le lerp less less_equal
    lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit long
    lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal ones_like
    positive pow reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square
    sub subtract tan tanh to true_divide trunc type type_as where xlogy zero zeros_like
    """.split()
)
REDUCTIONS = frozenset(
    "all allclose amax amin any count_nonzero equal linalg_vector_norm max mean min norm std sum var".split()
)
PLAIN = frozenset(
    """
    backward element_size get_device is_complex is_conj is_contiguous is_floating_point is_inference is_neg
    is_pinned is_shared is_signed register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad
    _has_compatible_shallow_copy_type _is_view _is_zerotensor
    """.split()
)
SIZES = frozenset("shape size numel nelement nbytes dim ndim ndimension __len__".split())
SPECIAL = frozenset(
    """
    grad copy_ __repr__ __format__ __reduce_ex__ __deepcopy__ data_ptr
    item tolist numpy __array__ __float__ __int__ __bool__
    new_empty new_zeros new_ones new_full new_tensor
    _amp_foreach_non_finite_check_and_unscale_
    """.split()
)
DUNDERS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__rsub__": "rsub",
    "__isub__": "sub_", "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div",
    "__rtruediv__": "div", "__rdiv__": "div", "__idiv__": "div_", "__itruediv__": "div_", "__div__": "div",
    "__pow__": "pow", "__rpow__": "pow", "__ipow__": "pow_", "__neg__": "neg", "__pos__": "positive",
    "__abs__": "abs", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt",
    "__ge__": "ge", "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not", "__mod__": "remainder", "__floordiv__": "floor_divide",
    "__rfloordiv__": "floor_divide", "__iand__": "bitwise_and_", "__ior__": "bitwise_or_",
}  # fmt: skip
# getters that nobody would expect to give either the piece or the whole
REFUSED_GETTERS = frozenset(("T", "H", "mT", "mH", "real", "imag"))


@lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule:
    """The rule for the function or operator (``mul.Tensor``) of this name."""
    name = name.partition(".")[0]
    name = DUNDERS.get(name, name)
    if name in SIZES:
        return Rule(Kind.SIZE, name)
    if name in SPECIAL:
        return Rule(Kind.SPECIAL, name)
    if name in PLAIN:
        return Rule(Kind.PLAIN, name)
    if name in REDUCTIONS:
        return Rule(Kind.REDUCTION, name)
    if name == "_foreach_norm":
        return Rule(Kind.REDUCTION, name, is_list=True)
    if name.startswith("_fused_") and name.endswith("_"):
        return Rule(Kind.ELEMENTWISE, name, in_place=True, is_list=True)
    is_list = name.startswith("_foreach_")
    base = name.removeprefix("_foreach_")
    in_place = base.endswith("_")
    base = base.removesuffix("_")
    if base == "copy" and is_list or base in ELEMENTWISE:
        return Rule(Kind.ELEMENTWISE, name, in_place, is_list)
    return Rule(Kind.REFUSED, name)
