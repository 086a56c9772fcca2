"""Operators on a GPU without a profile: classes, dtypes of the arithmetic, backward passes, a card's rows."""

from dataclasses import replace

import pytest

from mixmesh.cluster import Cluster, Device
from mixmesh.cluster.catalogue import CATALOGUE, SUSTAINED, TF32_TFLOP_PER_S
from mixmesh.cluster.classes import MEMORY_BOUND, PRODUCTS
from mixmesh.cluster.classes import ROWS as CLASSES
from mixmesh.cost import CostModel, call_flop, op_key
from mixmesh.cost import efficiency as e
from mixmesh.cost.kernels import ATTENTION_BACKWARD, PER_GRADIENT, arithmetic, class_of, kernels
from mixmesh.cost.model import BACKWARD_ISSUE, GPU_ISSUE_S
from mixmesh.cost.scales import class_of_key, dtype_of_key
from mixmesh.cost.work import product_size
from mixmesh.lang.ir import ValueType
from mixmesh.lang.rules import Call


def card(name: str) -> Device:
    return Cluster.parse(f'[[machine]]\ndevices = ["{name}"]\n').devices[0]


def call(op: str, *shapes: tuple[int, ...], out: tuple[int, ...], dtype: str = "f32", args=()) -> Call:
    return Call(op, args, (), tuple(ValueType(dtype, s) for s in shapes), (ValueType(dtype, out),))


def mm(m: int, k: int, n: int, dtype: str = "f32") -> Call:
    return call("aten.mm", (m, k), (k, n), out=(m, n), dtype=dtype)


A100, V100 = card("A100-40GB"), card("V100-16GB")
LARGE = mm(8192, 8192, 8192)
HEADS = call("aten.bmm", (64, 512, 64), (64, 64, 512), out=(64, 512, 512))


def conv(channels: int, groups: int) -> Call:
    image, weight = (8, channels, 32, 32), (channels, channels // groups, 3, 3)
    args = ("x", "w", None, (1, 1), (1, 1), (1, 1), groups)
    return call("aten.conv2d", image, weight, out=image, args=args)


@pytest.mark.parametrize(("name", "power"), [(e.PRODUCT, 1 / 6), (e.CONVOLUTION, 1 / 2)])
def test_faster_tensor_cores_reach_less_of_their_peak(name, power):
    """Those of a GeForce card, which are only twice as fast as its other arithmetic, reach most of it."""
    geforce = card("RTX3090-24GB")
    shares = [e.efficiency(name, e.HALF, device).share for device in (geforce, V100, A100)]
    ratios = [device.half_flop_per_s / device.flop_per_s for device in (geforce, V100, A100)]
    assert shares == pytest.approx([0.9 * ratio**-power for ratio in ratios]) and shares[0] > shares[1]
    own = replace(A100, efficiency=((name, e.HALF, 0.5, 0.0),))
    assert e.efficiency(name, e.HALF, own).share == 0.5
    assert e.efficiency(e.PRODUCT, e.F32, A100).share == e.efficiency(e.PRODUCT, e.F32, V100).share


def test_every_class_has_a_usual_row():
    assert set(e.USUAL) == set(CLASSES) and len(CLASSES) == 3 * len(PRODUCTS) + len(MEMORY_BOUND)
    assert all(0 < row.share <= 1 and row.ramp_s > 0 and row.backward == 1 for row in e.USUAL.values())


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (LARGE, e.PRODUCT),
        (HEADS, e.THIN),  # heads of 64 fill no tile
        (mm(4096, 4096, 16), e.THIN),
        (conv(64, 1), e.CONVOLUTION),
        (conv(64, 64), e.DEPTHWISE),
        (call("aten.relu", (8, 8), out=(8, 8)), e.ELEMENTWISE),
        (call("aten.softmax.int", (8, 8), out=(8, 8)), e.REDUCTION),
        (call("aten.embedding", (1000, 8), (4, 8), out=(4, 8, 8)), e.LOOKUP),
    ],
)
def test_classes(operator, name):
    assert class_of(operator) == name


def test_sizes_of_products_are_those_of_their_factors():
    size = product_size(HEADS)
    assert (size.batch, size.m, size.n, size.k) == (64, 512, 512, 64)
    linear = call("aten.linear", (4, 32, 256), (512, 256), (512,), out=(4, 32, 512))
    size = product_size(linear)
    assert (size.batch, size.m, size.n, size.k) == (1, 128, 512, 256)
    assert product_size(call("aten.relu", (8, 8), out=(8, 8))) is None


def test_tf32_is_the_jobs_in_products_and_pytorchs_in_convolutions():
    """Where the card has it; half precision does not ask."""
    assert arithmetic(LARGE, A100, tf32=False) == e.F32 and arithmetic(LARGE, A100, tf32=True) == e.TF32
    assert arithmetic(LARGE, V100, tf32=True) == e.F32
    assert arithmetic(conv(64, 1), A100, tf32=False) == e.TF32
    assert arithmetic(mm(64, 64, 64, "bf16"), A100, tf32=True) == e.HALF

    def seconds(device: Device, tf32: bool) -> float:
        return kernels(LARGE, 0, device, tf32=tf32)[0].full_s

    assert seconds(A100, False) / seconds(A100, True) == pytest.approx(156 * 0.65 / (19.5 * 0.80))
    assert seconds(V100, True) == seconds(V100, False)
    # GeForce cards have no more of it than of plain float32, which has the better kernels
    geforce = card("RTX3090-24GB")
    assert seconds(geforce, True) == seconds(geforce, False)


def test_small_products_reach_less_of_the_peak():
    """Each kernel has its ramp: 256^3 of half precision is nearly all ramp, 8192^3 hardly any."""

    def share(size: int) -> float:
        forward, _ = kernels(mm(size, size, size, "bf16"), 0, A100, tf32=False)
        return 2 * size**3 / A100.half_flop_per_s / (forward.ramp_s + forward.full_s)

    row = e.efficiency(e.PRODUCT, e.HALF, A100)
    assert share(256) < 0.05 < share(1024) < share(8192) < row.share
    assert share(8192) == pytest.approx(row.share, rel=0.01)


def test_backward_passes_by_operator():
    """A product has one for each gradient, an attention 2.8 forward passes, norms and activations more than
    they read and write."""
    forward, backward = kernels(LARGE, 2, A100, tf32=True)
    assert backward.count == 2 and backward.full_s == pytest.approx(
        2 * PER_GRADIENT[e.PRODUCT] * forward.full_s
    )
    one = kernels(LARGE, 1, A100, tf32=True)[1]
    assert (
        one.full_s == pytest.approx(backward.full_s / 2) and kernels(LARGE, 0, A100, tf32=True)[1].count == 0
    )
    heads = (4, 16, 1024, 64)
    attention = call("aten.scaled_dot_product_attention", heads, heads, heads, out=heads, dtype="bf16")
    forward, backward = kernels(attention, 3, A100, tf32=False)
    assert backward.full_s == pytest.approx(ATTENTION_BACKWARD * forward.full_s)
    for op, factor in (
        ("relu", 2.25),
        ("gelu", 2.25),
        ("softmax.int", 2.25),
        ("layer_norm", 2.5),
        ("add.Tensor", 1),
    ):
        forward, backward = kernels(call(f"aten.{op}", (512, 512), out=(512, 512)), 1, A100, tf32=False)
        assert backward.full_s == pytest.approx(factor * forward.full_s), op


def test_the_hosts_cost_of_an_operator_is_the_devices():
    """A small one takes it and no more; its backward pass, which runs without Python, half of it a kernel."""
    small = mm(8, 8, 8)
    for issue, seconds in (("", GPU_ISSUE_S), (", issue_us = 12.5", 12.5e-6)):
        text = f"[[machine]]\ndevices = [{{ device = 'A100-40GB'{issue} }}]\n"
        time = CostModel(Cluster.parse(text)).op(small, 2, 0)
        assert time.forward.at(1.0) == pytest.approx(seconds)
        assert time.backward.at(1.0) == pytest.approx(2 * BACKWARD_ISSUE * seconds)


def test_a_card_may_have_rows_of_its_own():
    own = replace(A100, efficiency=((e.PRODUCT, e.TF32, 0.325, 1e-6, 1.5),))
    (usual, usual_back), (forward, backward) = (kernels(LARGE, 2, d, tf32=True) for d in (A100, own))
    assert forward.full_s == pytest.approx(2 * usual.full_s) and forward.ramp_s == 1e-6
    assert backward.full_s == pytest.approx(3 * usual_back.full_s)
    assert kernels(HEADS, 2, own, tf32=True) == kernels(HEADS, 2, A100, tf32=True)  # another class


def test_a_power_limit_slows_arithmetic_alone():
    limited, free = card("T4-16GB"), replace(card("T4-16GB"), sustained=1.0)
    assert limited.sustained == 0.6
    ratio = kernels(LARGE, 0, free, tf32=False)[0].full_s / kernels(LARGE, 0, limited, tf32=False)[0].full_s
    assert ratio == pytest.approx(0.6)
    relu = call("aten.relu", (4096, 4096), out=(4096, 4096))
    assert kernels(relu, 1, limited, tf32=False) == kernels(relu, 1, free, tf32=False)


def test_the_catalogues_later_figures_are_of_cards_that_it_has():
    assert {*TF32_TFLOP_PER_S, *SUSTAINED} <= set(CATALOGUE)
    for name, row in CATALOGUE.items():
        if row.tf32_tflop_per_s:  # on tensor cores half of half precision's peak, or of GeForce's a quarter
            assert row.supports_bf16 and row.tf32_tflop_per_s <= 0.51 * row.half_tflop_per_s, name
    assert CATALOGUE["V100-16GB"].tf32_tflop_per_s == 0


@pytest.mark.parametrize("operator", [LARGE, HEADS, mm(4096, 4096, 16), conv(64, 1), conv(64, 64)])
def test_a_profiles_keys_say_the_same_class(operator):
    key = op_key(operator)
    assert class_of_key(key, call_flop(operator)) == class_of(operator)
    for tf32 in (False, True):
        assert dtype_of_key(key, A100, tf32) == arithmetic(operator, A100, tf32=tf32)
