"""The peak bytes that a program holds on a rank: a liveness fold over the events of one step (``fold``).

Memory is linear in the shares at every moment, and the peak is the largest of the moments. Measured on CPUs
it is the resident set of the process, whose allocator holds a little more than is requested.
"""

from .flight import Flight, flight_of
from .moments import BEFORE
from .peaks import PeakMemory, held_moments, peak_memory_bytes
from .state import Held
from .tables import ALLOWANCE, HEAP_BYTES, SMALL_ALLOWANCE, Memory, Walked

__all__ = [
    "ALLOWANCE",
    "BEFORE",
    "HEAP_BYTES",
    "SMALL_ALLOWANCE",
    "Flight",
    "Held",
    "Memory",
    "PeakMemory",
    "Walked",
    "flight_of",
    "held_moments",
    "peak_memory_bytes",
]
