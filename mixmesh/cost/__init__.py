"""Layer 2: what an instruction costs on a rank. No torch."""

from .collectives import COLLECTIVES, CollectiveFit, ring_fit
from .curve import ZERO, Curve, affine_curve
from .model import VIEWS, CostModel, OpTime, call_flop, moved_bytes, roofline_s
from .profile import DeviceProfile, OpMeasurement, Profile, device_key, op_key

__all__ = [
    "COLLECTIVES", "VIEWS", "ZERO", "CollectiveFit", "CostModel", "Curve", "DeviceProfile",
    "OpMeasurement", "OpTime", "Profile", "affine_curve", "call_flop", "device_key", "moved_bytes", "op_key",
    "ring_fit", "roofline_s",
]  # fmt: skip
