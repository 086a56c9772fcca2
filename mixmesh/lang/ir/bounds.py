"""The most that program text may ask for. Plans come from anywhere: a number in one must not exhaust memory.

Every bound is far above what a real program has, and below what a reader could not hold.
"""

from __future__ import annotations

MAX_RANKS = 65_536
MAX_INSTRUCTIONS = 100_000
MAX_TEXT_BYTES = 64 * 2**20
MAX_DEPTH = 8  # lists within lists; arguments of operators have two
MAX_DIMS = 64  # as in PyTorch
MAX_INTEGER = 2**63 - 1  # the largest that an operator takes
MAX_ELEMENTS = 2**48  # in one tensor: sizes in bytes stay exact in floating point
MAX_MICRO_STEPS = 65_536  # for one rank in one step
