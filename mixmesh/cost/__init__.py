"""Layer 2: the costs of an instruction on a rank. No torch."""

from .cold import ALWAYS_WARM, Cold
from .collectives import COLLECTIVES, DIRECT, FLAT, LEVELLED, CollectiveFit, default_algorithm, ring_fit
from .curve import ZERO, Curve, affine_curve
from .links import LinkMeasurement, MeasuredCollective, measurement_of_fit
from .model import CostModel, OpTime, roofline_s
from .profile import DeviceProfile, OpMeasurement, Profile, device_key, host_key, links_fingerprint, op_key
from .unmeasured import BLOCKING_SENDS, ONE_SHOT_SUMS, UNMEASURED, check_unmeasured
from .work import VIEWS, call_flop, moved_bytes

__all__ = [
    "ALWAYS_WARM", "BLOCKING_SENDS",
    "COLLECTIVES", "DIRECT", "FLAT", "LEVELLED", "ONE_SHOT_SUMS", "UNMEASURED", "VIEWS",
    "ZERO", "Cold", "CollectiveFit", "CostModel", "Curve", "DeviceProfile", "LinkMeasurement",
    "MeasuredCollective", "OpMeasurement", "OpTime", "Profile", "affine_curve", "call_flop",
    "check_unmeasured", "default_algorithm", "device_key", "host_key", "links_fingerprint",
    "measurement_of_fit", "moved_bytes", "op_key", "ring_fit", "roofline_s",
]  # fmt: skip
