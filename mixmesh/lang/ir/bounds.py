"""Upper limits for program text. Plans come from anywhere, and a number in one must not exhaust memory.

Every limit is far above what real programs need, and low enough for the reader to hold the result.
"""

from __future__ import annotations

MAX_RANKS = 65_536
MAX_INSTRUCTIONS = 100_000
MAX_TEXT_BYTES = 64 * 2**20
MAX_DEPTH = 8  # levels of lists within lists; the arguments of operators have two
MAX_DIMS = 64  # as in PyTorch
MAX_INTEGER = 2**63 - 1  # as in operators
MAX_ELEMENTS = 2**48  # in one tensor: sizes in bytes stay exact in floating point
MAX_MICRO_STEPS = 65_536  # micro-batches of one rank in one step
