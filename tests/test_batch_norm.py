"""Batch norm as sums over all samples and what follows from them: exact on shards, one sum per pass."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.nn.functional as F
from small_graphs import THREE, cluster
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixmesh.cost import CostModel, op_key
from mixmesh.errors import PlanError, VerificationError
from mixmesh.frontend.trace import trace
from mixmesh.lang.check import check_program
from mixmesh.lang.ir import make_ratio, parse_program, samples_of
from mixmesh.lang.operators import PIECE_BYTES, moments, normalise, norms, running_statistics
from mixmesh.lang.optimizer_states import OptimizerStates
from mixmesh.lang.rules import call_of
from mixmesh.measure.profiler.meter import Meter
from mixmesh.measure.profiler.operators import measure_ops, shard_program, time_op
from mixmesh.measure.verification import verify
from mixmesh.passes.recomputation import recomputed
from mixmesh.search.baselines import data_parallel
from mixmesh.simulator import simulate
from mixmesh.step.memory import Memory

EPS = 1e-5
SHAPES = {"rows": (7, 5), "series": (6, 5, 8), "images": (6, 5, 4, 3), "volumes": (4, 5, 2, 3, 2)}
COSTS = CostModel(cluster(THREE))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batch_norm(x, weight=None, bias=None):
    return normalise(x, moments(x), weight, bias, x.numel() // x.shape[1], EPS)


def native(x, weight=None, bias=None):
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def affine(dtype=torch.float64, channels=5):
    return [(torch.rand(channels, dtype=dtype) + 0.5).requires_grad_() for _ in range(2)]


def error(got, want) -> float:
    """Largest difference, relative to the largest entry."""
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


# --- the operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parameters", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_pytorchs_batch_norm(shape, num_parameters):
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 2).requires_grad_()
    leaves = [x, *affine()[:num_parameters]]
    g = torch.randn_like(x)
    results = [f(*leaves) for f in (batch_norm, native)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(y, leaves, g) for y in results]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_gradients_are_those_of_finite_differences():
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    given = (torch.rand(2, 2, dtype=torch.float64) + 1).requires_grad_()
    weight, bias = affine(channels=2)
    assert torch.autograd.gradcheck(moments, (x,))
    # differences change a tensor without telling it: statistics kept for the same tensor would stay
    assert torch.autograd.gradcheck(
        lambda x, given, *leaves: normalise(x, given * 1, *leaves, count=20, eps=EPS),
        (x, given, weight, bias),
    )


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3, 1e4])
@pytest.mark.parametrize("shape", [(64, 8, 16, 16), (600, 8)])
def test_single_precision_is_as_good_as_pytorchs(shape, mean):
    """Of numbers far from zero no squares are added up in f32: mean 1000 and deviation 1 are no harder."""
    x = (torch.randn(shape) + mean).requires_grad_()
    exact = x.detach().double().requires_grad_()
    leaves, g = affine(torch.float32, 8), torch.randn(shape)
    want = native(exact, *(p.double() for p in leaves))
    (want_dx,) = torch.autograd.grad(want, exact, g.double())
    errors = []
    for f in (batch_norm, native):
        y = f(x, *leaves)
        (dx,) = torch.autograd.grad(y, x, g)
        errors.append((error(y, want), error(dx, want_dx)))
    ours, pytorchs = errors
    assert all(a < 1.5 * b + 3e-7 for a, b in zip(ours, pytorchs)), errors
    count = x.numel() // 8
    # of all samples, and of parts of them of which one is a single sample
    wholes = moments(x), sum(moments(part) for part in x.split([1, len(x) // 3, len(x) - 1 - len(x) // 3]))
    for s1, s2 in wholes:
        var = s2 / count - (s1 / count) ** 2
        dims = [d for d in range(x.ndim) if d != 1]
        torch.testing.assert_close(s1 / count, exact.mean(dims), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(var, exact.var(dims, correction=0), rtol=1e-6, atol=0)


def test_sums_of_large_data_are_made_piece_by_piece():
    x = torch.randn(5, 3, 512, 300) + torch.arange(5.0).reshape(5, 1, 1, 1)  # samples differ in their means
    assert x.nbytes > 3 * PIECE_BYTES
    exact = x.double()
    want = torch.stack((exact.sum((0, 2, 3)), exact.square().sum((0, 2, 3))))
    torch.testing.assert_close(moments(x), want, rtol=1e-6, atol=0)
    strided = x.transpose(2, 3)
    torch.testing.assert_close(moments(strided), want, rtol=1e-6, atol=0)


LAYOUTS = {
    "plain": lambda x: x.clone(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "rows": lambda x: x.flatten(2).mT.contiguous().mT.view(x.shape),
    "transposed": lambda x: x.mT.contiguous().mT,
    "part": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_data", LAYOUTS)
def test_any_layout_will_do(of_data, of_gradient, samples):
    """PyTorch's own kernel gives another gradient for one sample of rows and a plain gradient of it."""
    x, g = torch.randn(2, samples, 5, 4, 3, dtype=torch.float64)
    weight, bias = affine()
    sums = (moments(x) + moments(x + 1)).requires_grad_()
    found = []
    for data, gradient in ((x, g), (LAYOUTS[of_data](x), LAYOUTS[of_gradient](g))):
        data = data.detach().requires_grad_()
        y = normalise(data, sums, weight, bias, samples * 24, EPS)
        own = moments(data)
        (of_own,) = torch.autograd.grad(own, data, torch.ones_like(own))
        found.append((y, *torch.autograd.grad(y, (data, sums, weight, bias), gradient), own, of_own))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gpus_compute_the_same(dtype):
    bound = max(10 * torch.finfo(dtype).eps, 1e-12 if dtype == torch.float64 else 2e-6)
    for layout, samples, num_parameters in itertools.product(LAYOUTS.values(), (1, 6), (0, 2)):
        x = layout(torch.randn(samples, 5, 4, 3, dtype=torch.float64) + 1).to(dtype)
        g, parameters, found = torch.randn_like(x), affine()[:num_parameters], []
        for device in ("cpu", "cuda"):
            leaves = [t.detach().to(device, dtype).requires_grad_() for t in (x, *parameters)]
            y = batch_norm(*leaves)
            grads = torch.autograd.grad(y, leaves, g.to(device))
            found.append([t.cpu() for t in (y, moments(leaves[0]), *grads)])
        for got, want in zip(*found):
            assert got.dtype == want.dtype and error(got, want) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, None], ids=["f32", "half"])
def test_half_types_keep_wide_statistics(dtype, parameters):
    x = (torch.randn(16, 5, 6, 6) * 2 + 30).to(dtype).requires_grad_()
    weight, bias = (p.detach().to(parameters or dtype).requires_grad_() for p in affine(torch.float32))
    g = torch.randn_like(x)
    leaves = (x, weight, bias)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    y, want = batch_norm(*leaves), native(*exact)
    assert y.dtype == dtype and moments(x).dtype == torch.float64
    torch.testing.assert_close(moments(x), moments(exact[0]), rtol=1e-6, atol=0)
    step = torch.finfo(dtype).eps
    assert error(y, want) < 2 * step
    pairs = zip(leaves, torch.autograd.grad(y, leaves, g), torch.autograd.grad(want, exact, g.double()))
    for leaf, got, wanted in pairs:
        assert got.dtype == leaf.dtype and error(got, wanted) < 4 * step


def test_constant_channels_and_single_values():
    x = torch.full((4, 3, 5), 7.0, requires_grad=True)
    y = batch_norm(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(x))
    assert y.abs().max() < 1e-2 and dx.isfinite().all()
    assert (batch_norm(torch.randn(1, 3)).abs() < 1e-4).all()
    assert torch.equal(moments(torch.empty(0, 3, 5)), torch.zeros(2, 3, dtype=torch.float64))


def test_running_statistics_follow():
    x, norm = torch.randn(6, 5, 4) * 2 + 1, nn.BatchNorm1d(5, momentum=0.3)
    before = norm.running_mean.clone(), norm.running_var.clone()
    norm(x)
    sums = moments(x.requires_grad_())
    moved = running_statistics(sums, *before, 24, 0.3)
    torch.testing.assert_close(moved, (norm.running_mean, norm.running_var))
    assert not any(t.requires_grad for t in moved)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, m, c: moments(c),
        lambda x, m, c: moments(x.long()),
        lambda x, m, c: normalise(x, m[:1], c, c, 24, EPS),
        lambda x, m, c: normalise(x, m, c[:4], c, 24, EPS),
        lambda x, m, c: normalise(x, m, c, c[:4], 24, EPS),
        lambda x, m, c: running_statistics(m, c, c[:4], 24, 0.1),
    ],
)
def test_kernels_are_never_given_what_does_not_fit(call):
    with pytest.raises(RuntimeError):
        call(torch.randn(6, 5, 4), torch.rand(2, 5, dtype=torch.float64), torch.rand(5))


# --- graphs and programs -------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions with batch norm of several kinds, and a loss."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, **options)
        self.second, self.norm2 = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, **options)
        self.head, self.norm3 = nn.Linear(8, 4), nn.BatchNorm1d(4, **options)

    def forward(self, x, y):
        x = self.norm1(self.first(x)).relu()
        x = self.norm2(self.second(x)).relu()
        return F.cross_entropy(self.norm3(self.head(x.mean((2, 3)))), y)


def images(samples: int = 10) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 3, 8, 8) + 1, "y": torch.arange(samples) % 4}


def program_of(ratio, **options):
    return data_parallel(trace(Net(**options), images()).graph, COSTS, make_ratio(ratio))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_a_layer_is_two_operators_and_what_moves_its_buffers(options):
    ops = [n.op for n in trace(Net(**options), images()).graph.nodes]
    kept = 0 if "track_running_stats" in options else 3
    assert ops.count("mixmesh.moments") == ops.count("mixmesh.normalise") == 3
    assert ops.count("mixmesh.running_statistics") == kept and ops.count("update") == 3 * kept
    assert "aten.rsqrt" not in ops


def test_one_sum_per_layer_and_pass():
    program = program_of([0.5, 0.3, 0.2])
    sums = [i for i in program.instructions if i.is_redistribution]
    makers = [program.producers[i.inputs[0]].op for i in sums if i.op == "all_reduce"]
    assert makers.count("mixmesh.moments") == 3
    # what lies between two layers moves nothing else
    assert {i.op for i in sums if i.result in program.requires_grad} <= {"all_reduce", "local_slice"}
    events = simulate(program, COSTS, events=True).events
    sizes = [e.size_bytes for e in events if e.stream == "communication" and e.op == "all_reduce"]
    for channels in (6, 8, 4):
        assert sizes.count(2 * 8 * channels) == 2 * 3  # forward and backward, on three ranks


def test_programs_print_and_are_checked():
    program = program_of([0.5, 0.3, 0.2])
    text = str(program)
    assert parse_program(text) == program and "mixmesh.normalise(" in text
    check_program(program)
    with pytest.raises(VerificationError, match="another type"):
        check_program(parse_program(text.replace("f64[2, 6]", "f64[2, 3]", 1)))
    line = next(line for line in text.splitlines() if "mixmesh.moments(" in line)
    with pytest.raises(VerificationError, match="cannot be computed with these placements"):
        check_program(parse_program(text.replace(line, line.replace("P(sum)", "R"))))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.parametrize("ratio", [(0.5, 0.3, 0.2), (0.6, 0.0, 0.4), (0.02, 0.9, 0.08)], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_training_equals_one_device(options, ratio, again):
    """Also with ranks without samples, and with activations computed again."""
    model, batch = Net(**options), images()
    traced = trace(model, batch)
    program = data_parallel(traced.graph, COSTS, make_ratio(ratio))
    if again:
        program = recomputed(program)
        assert any(i.attrs for i in program.instructions)
    report = verify(model, batch, program, traced=traced, steps=2)
    assert report.ok and report.max_gradient_error_f64 < 1e-9


def test_channels_may_be_cut():
    """Where the channels of data are cut, everything about them is each rank's own."""
    text = """program p world=2 {
      ratio r = [0.75, 0.25]
      %x = input("x") : f64[6, 8, 3] S(1)@r
      %w = param("w") : f64[8] S(0)@r
      %m = mixmesh.moments(%x) : f64[2, 8] S(1)@r
      %n = mixmesh.normalise(%x, %m, %w, none, 18, 1e-05) : f64[6, 8, 3] S(1)@r
      %q = aten.mul.Tensor(%n, %x) : f64[6, 8, 3] S(1)@r
      %loss = aten.sum(%q) : f64[] P(sum)
      return %loss }"""
    from mixmesh.runtime.interpret import interpret

    x, weight = torch.randn(6, 8, 3, dtype=torch.float64), affine(channels=8)[0]
    program = parse_program(text)
    check_program(program)
    interpret(program, {"w": weight}, {"x": x}).loss.backward()
    (want,) = torch.autograd.grad((native(x, weight) * x).sum(), weight)
    torch.testing.assert_close(weight.grad, want)


def test_micro_steps_are_refused():
    with pytest.raises(PlanError, match="micro-batches cannot run") as caught:
        samples_of(program_of([0.5, 0.3, 0.2]))
    assert "group norm" in str(caught.value) and "test_batch_norm.py" in str(caught.value)


# --- costs ---------------------------------------------------------------------------------------------


def test_activations_are_kept_once():
    """moments and normalise keep the same data; relu keeps its result."""
    text = """program p world=1 {
      ratio r = [1.0]
      %x = input("x") : f32[100, 8] S(0)@r
      %v = param("v") : f32[16, 8] R
      %h = aten.linear(%x, %v) : f32[100, 16] S(0)@r
      %m = mixmesh.moments(%h) : f64[2, 16] P(sum)
      %s = all_reduce(%m) : f64[2, 16] R
      %n = mixmesh.normalise(%h, %s, none, none, 100, 1e-05) : f32[100, 16] S(0)@r
      %a = aten.relu(%n) : f32[100, 16] S(0)@r
      %loss = aten.mean(%a) : f32[] P(sum)
      return %loss }"""
    program = parse_program(text)
    held = {m.what: sum(m.held.values()) for m in Memory(program, OptimizerStates(0)).moments}
    data, small = 4 * 100 * 16, 8 * 2 * 16
    # at the loss: %h, %a, and the sums
    assert held["%loss"] - held["%h"] == data + small + 4


def test_the_profiler_measures_a_norm_as_a_program_runs_it():
    graph = trace(Net(), images()).graph
    node = next(node for node in graph.nodes if node.op == "mixmesh.normalise")
    program, _ = shard_program(graph, node, None, {}, 1.0)
    with Masks() as masks:
        time_op(program, Meter(torch.device("cpu"), emulated=False), torch.device("cpu"))
    assert masks.of_data and not any(masks.of_data)


def test_the_profiler_measures_them():
    graph = trace(Net(), images()).graph
    cpu = torch.device("cpu")
    deadline = time.perf_counter() + 60
    meter, device = Meter(cpu, emulated=False), COSTS.cluster.devices[0]
    found, skipped = measure_ops(graph, (0.5, 1.0), meter, cpu, device, deadline, lambda _: None)
    assert not skipped
    for node in graph.nodes:
        if node.op.startswith("mixmesh."):
            curves = found[op_key(call_of(node, graph.types))]
            assert curves.forward.at(1.0) > 0
            assert (curves.backward.at(1.0) > 0) == (node.op != "mixmesh.running_statistics")


# --- the kernels of a GPU, written out ------------------------------------------------------------------


def reduced(y_grad, x, mean, scale, weight, *wanted):
    """torch.batch_norm_backward_reduce."""
    dims = [d for d in range(x.ndim) if d != 1]
    of_y = y_grad.sum(dims)
    of_difference = (y_grad * (x - _by_channel(mean, x))).sum(dims)
    return of_y, of_difference, of_difference * scale, of_y


def element_by_element(y_grad, x, mean, scale, weight, of_y, of_difference, count):
    """torch.batch_norm_backward_elemt."""
    mean, scale, weight, of_y, of_difference = (
        _by_channel(t, x) for t in (mean, scale, weight, of_y / count, of_difference / count)
    )
    return (y_grad - of_y - (x - mean) * scale**2 * of_difference) * weight * scale


def _by_channel(t, x):
    return t.view([1, -1] + [1] * (x.ndim - 2))


@pytest.fixture
def gpu_kernels(monkeypatch):
    """Makes a CPU take the way of a GPU, and gives the list of the gradients that were computed at once."""
    made = []
    monkeypatch.setattr(norms, "has_gpu_kernels", lambda x: True)
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", reduced)
    monkeypatch.setattr(
        torch, "batch_norm_backward_elemt", lambda *args: made.append(1) or element_by_element(*args)
    )
    return made


def normalised(x, weight, bias, moments=None):
    moments = torch.ops.mixmesh.moments(x) if moments is None else moments
    return torch.ops.mixmesh.normalise(x, moments, weight, bias, x.numel() // x.shape[1], 1e-5)


def data_of_channels(weight=0.7):
    torch.manual_seed(0)
    x = (torch.randn(6, 3, 4, dtype=torch.float64) + 5).requires_grad_()
    return x, torch.full((3,), weight, dtype=torch.float64).requires_grad_(), torch.zeros_like(x[0, :, 0])


@pytest.mark.parametrize("weight", [0.7, 0.0])  # many models begin with zeros
def test_a_gpu_computes_one_gradient(gpu_kernels, weight):
    x, scale, bias = data_of_channels(weight)
    y_grad = torch.randn_like(x)
    own = torch.autograd.grad(normalised(x * 1, scale, bias), (x, scale), y_grad)
    plain = torch.autograd.grad(
        torch.batch_norm(x, scale, bias, None, None, True, 0.0, 1e-5, False), (x, scale), y_grad
    )
    torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-9)
    assert len(gpu_kernels) == 1


@pytest.fixture(params=["a GPU's kernels", "a CPU's"])
def joined_kernels(request):
    """Either way in which one gradient of the data takes the place of two."""
    if request.param == "a GPU's kernels":
        request.getfixturevalue("gpu_kernels")


class Masks(TorchDispatchMode):
    """Notes whether each backward pass of a batch norm computes a gradient of the data."""

    def __init__(self):
        super().__init__()
        self.of_data = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.native_batch_norm_backward.default:
            self.of_data.append(args[-1][0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cpu_computes_one_gradient(dtype, layout):
    """Half types keep two: kernels compute in single precision, a sum of two tensors would not."""
    x = (torch.randn(20, 3, 4, 5) + 5).to(dtype).to(memory_format=layout).requires_grad_()
    weight, bias = affine(channels=3)
    wide = torch.promote_types(dtype, torch.float32)
    weight, bias, y_grad = weight.to(wide), bias.to(wide), torch.randn(x.shape).to(dtype)
    with Masks() as masks:
        own = torch.autograd.grad(normalised(x * 1, weight, bias), (x, weight, bias), y_grad)
    assert masks.of_data == [dtype == torch.bfloat16]
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.autograd.grad(native(*leaves), leaves, y_grad.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for ours, plain in zip(own, exact):
        torch.testing.assert_close(ours.double(), plain, rtol=tolerance, atol=tolerance)


def test_moments_with_two_uses_have_gradients_of_their_own(joined_kernels):
    x, scale, bias = data_of_channels()
    y_grad = torch.randn_like(x)

    def twice(data):
        moments = torch.ops.mixmesh.moments(data)
        return normalised(data, scale, bias, moments) + normalised(data, scale * 2, bias, moments)

    def plain(data):
        return 3 * torch.batch_norm(data, scale, bias, None, None, True, 0.0, 1e-5, False)

    own, other = (torch.autograd.grad(f(x * 1), (x, scale), y_grad) for f in (twice, plain))
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)
    again = x * 1  # two norms of the same data
    own = torch.autograd.grad(normalised(again, scale, bias) + normalised(again, scale * 2, bias), x, y_grad)
    torch.testing.assert_close(own, other[:1], rtol=1e-9, atol=1e-9)


def test_a_gradient_that_nobody_took_is_not_in_the_next(joined_kernels):
    x, scale, bias = data_of_channels()
    y_grad = torch.randn_like(x)
    y = normalised(x * 1, scale, bias)
    first = torch.autograd.grad(y, scale, 100 * y_grad, retain_graph=True)[0]  # moments have no part in it
    own = torch.autograd.grad(y, (x, scale), y_grad)
    plain = torch.autograd.grad(
        torch.batch_norm(x, scale, bias, None, None, True, 0.0, 1e-5, False), (x, scale), y_grad
    )
    torch.testing.assert_close(own, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(first, 100 * own[1])


def test_a_gpu_moves_running_statistics_as_its_own_norm(gpu_kernels):
    x, scale, bias = data_of_channels()
    data = x.detach().float()
    mean, var = torch.zeros(3), torch.ones(3)
    moments = torch.ops.mixmesh.moments(data)
    count = data.numel() // 3
    own = torch.ops.mixmesh.running_statistics(moments, mean, var, count, 0.1)
    torch.batch_norm(data, None, None, mean, var, True, 0.1, 1e-5, False)
    torch.testing.assert_close(own, (mean, var), rtol=1e-6, atol=1e-6)
    moments.mul_(2)  # what was computed of other numbers is not taken again
    other = torch.ops.mixmesh.running_statistics(moments, mean, var, count, 0.1)
    assert not torch.allclose(other[0], own[0])
