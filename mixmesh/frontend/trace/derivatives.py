"""Derivatives that a forward pass computes, as operators of the pass.

Export sees no operators of a backward pass. So what leads from the inputs to the outputs of a derivative
runs once more, on fake tensors, and autograd goes back through it. A record of both holds the backward
operators as ordinary ones, whose derivatives PyTorch knows in turn. They are appended to the pass that is
exported. What the pass has computed already is taken from there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _python_dispatch as dispatch

from .fx_nodes import packet_of, slot_of, target_of
from .written import Groups, may_share, written_by

aten = torch.ops.aten

# all of whose results have gradients
_ALL_DIFFERENTIABLE = {
    aten.var_mean, aten.std_mean, aten.aminmax, aten.linalg_svd, aten._linalg_svd, aten.linalg_eigh,
    aten._linalg_eigh, aten.linalg_qr, aten.linalg_slogdet,
}  # fmt: skip
DETACHES = {aten.detach.default, aten.detach_.default}
grad = torch.autograd.grad  # as it is outside of a trace


class Unknown(Exception):
    """A derivative that cannot be written as operators of a pass."""


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of ``torch.autograd.grad``, with ``create_graph``, of tensors of the pass that is being
    exported; None for an input that no output depends on. Raises Unknown."""
    tracer = _tracer()
    ends, starts = [_node_of(t) for t in outputs], [_node_of(t) for t in inputs]
    weights = [None if t is None else _node_of(t) for t in grad_outputs]
    steps = _between(tracer.graph, starts, ends)
    reached = [(n, w) for n, w in zip(ends, weights) if n in steps or n in starts]
    if not reached:
        return [None] * len(starts)
    leaves = _leaves(steps, [*starts, *weights])
    is_written = any(n in steps for n in starts)
    kept = [n for n in steps if isinstance(n.meta.get("val"), Tensor)]

    def run(*values: Tensor) -> tuple[list[Tensor | None], list[Tensor]]:
        # a start that is written to is no leaf, but a result of them
        apart = (v.detach().requires_grad_(v.is_floating_point()) for v in values)
        env: dict[fx.Node, Any] = dict(zip(leaves, apart if is_written else values))
        env |= {n: env[n].detach().requires_grad_() for n in starts if n in env}
        for node in steps:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            target = target_of(node)
            env[node] = _SLOPES_TIED.get(target, target)(*args, **kwargs)
        seeds = [None if w is None else env[w] for _, w in reached]
        slopes = grad([env[n] for n, _ in reached], [env[n] for n in starts], seeds, allow_unused=True)
        return list(slopes), [env[n] for n in kept]

    graph = _record(run, [n.meta["val"] for n in leaves])
    results, again = _results(graph)
    in_the_pass = {new: old for new, old in zip(again, kept) if new is not None}
    return _append(graph, results, dict(zip(_placeholders(graph), leaves)) | in_the_pass, tracer)


def written_out(function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The results of a function of tensors of the pass that is being exported, which may use autograd within
    it; appended to the pass as ordinary operators. Raises Unknown."""
    tracer = _tracer()
    leaves = [_node_of(t) for t in tensors]
    graph = _record(lambda *values: (list(function(*values)), []), [n.meta["val"] for n in leaves])
    results, _ = _results(graph)
    return _append(graph, results, dict(zip(_placeholders(graph), leaves)), tracer)


def depends_on(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether gradients could go from a tensor of the pass that is being exported to one of ``others``."""
    slots = [slot_of(t) for t in (tensor, *others)]
    todo = [slots[0].proxy.node] if slots[0] is not None else []
    ends = {slot.proxy.node for slot in slots[1:] if slot is not None}
    seen = set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node not in seen and node.target not in DETACHES:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _tracer() -> Any:
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        raise Unknown("no pass is being exported")
    return mode.tracer


def _node_of(tensor: Tensor) -> fx.Node:
    slot = slot_of(tensor)
    if slot is None:
        raise Unknown("a tensor from elsewhere")
    return slot.proxy.node


def _between(graph: fx.Graph, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    """The operators that lead from ``starts`` to ``ends`` with gradients, in order, and those that make what
    they write to."""
    memory = _memory_of(graph)
    able = list(_with_gradient(graph))
    depending = set[fx.Node]()
    written = {memory.root(n) for node in able for n in written_by(node)} & set(map(memory.root, starts))
    count = -1
    while count < len(depending):  # a tensor that shares memory with one that is written to later depends too
        count = len(depending)
        for node in able:
            depends = any(n in depending or n in starts for n in node.all_input_nodes)
            if depends or memory.root(node) in written:
                depending.add(node)
                written.update(map(memory.root, written_by(node)))
    needed = set(ends)
    for node in reversed(able):
        if node in depending and (node in needed or any(written_by(node))):
            needed.add(node)
            needed.update(node.all_input_nodes)
    steps = [n for n in able if n in depending and n in needed]
    for node in steps:
        if not (isinstance(node.target, OpOverload) or node.target is operator.getitem):
            raise Unknown(f"{node.target}")
    _check_unchanged(graph, steps, depending.union(starts), memory)
    return steps


def _memory_of(graph: fx.Graph) -> Groups:
    """The nodes in groups that may share memory."""
    groups = Groups()
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            for other in may_share(node):
                groups.join(node, other)
    return groups


def _with_gradient(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operators that gradients go through."""
    enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.op != "placeholder" and enabled and node.target not in DETACHES:
            yield node


def _check_unchanged(
    graph: fx.Graph, steps: Sequence[fx.Node], depending: set[fx.Node], memory: Groups
) -> None:
    """Raises Unknown if what the steps have read, or what depends on the starts, is written to later by an
    operator that is none of them, or if the steps write to what they have not made."""
    inside = set(steps)
    used = set[fx.Node]()
    for node in graph.nodes:
        for changed in written_by(node) if node.op == "call_function" else ():
            if changed not in inside if node in inside else memory.root(changed) in used:
                raise Unknown(f"what {node.target} writes to in place")
        if node in inside or node in depending:
            used.add(memory.root(node))
        if node in inside:
            used.update(map(memory.root, node.all_input_nodes))


def _leaves(steps: Sequence[fx.Node], others: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The nodes that ``steps`` read and that are none of them, then those of ``others``."""
    inside = set(steps)
    read = [n for step in steps for n in step.all_input_nodes]
    return [n for n in dict.fromkeys((*read, *others)) if n is not None and n not in inside]


def _record(run: Callable, examples: Sequence[Tensor]) -> fx.Graph:
    """A record of a function in functional form, with backward operators as ordinary ones."""
    fake_mode = detect_fake_mode(list(examples))
    if fake_mode is None:
        raise Unknown("no tensors")
    with _outside_of_the_pass(), fake_mode:
        once = proxy_tensor.make_fx(run, decomposition_table=_TABLE)(*examples)
        return proxy_tensor.make_fx(torch.func.functionalize(once))(*examples).graph


@contextmanager
def _outside_of_the_pass() -> Iterator[None]:
    with (
        dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),  # the others have no second derivative
    ):  # fmt: skip
        yield


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def _results(graph: fx.Graph) -> tuple[list, list]:
    (output,) = graph.find_nodes(op="output")
    results, again = output.args[0]
    return list(results), list(again)


def _append(
    graph: fx.Graph, results: Sequence[fx.Node | None], known: Mapping[fx.Node, fx.Node], tracer: Any
) -> list[Tensor | None]:
    """Appends the part of a record that ``results`` need and that is not ``known``, and gives the results."""
    needed = {n for n in results if n is not None}
    for node in reversed(graph.nodes):
        if node in needed and node not in known:
            needed.update(node.all_input_nodes)
    proxies: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    with dispatch._disable_current_modes():
        for node in graph.nodes:
            if node not in needed:
                continue
            values[node] = node.meta.get("val")
            if node in known:
                proxies[node] = fx.Proxy(known[node], tracer)
            elif node.target in DETACHES:  # autograd has saved its argument
                source = node.all_input_nodes[0]
                proxies[node], values[node] = proxies[source], values[source]
            else:
                proxies[node] = _appended(node, proxies, tracer)
        return [None if n is None else _tracked(values[n], proxies[n], tracer) for n in results]


def _appended(node: fx.Node, proxies: Mapping[fx.Node, Any], tracer: Any) -> fx.Proxy:
    target = target_of(node)
    if node.op != "call_function":
        raise Unknown(f"a constant of {node.name}")
    if target is operator.getitem and not _is_differentiable(node):
        raise Unknown(f"{target_of(node.all_input_nodes[0])}")
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        raise Unknown(f"{target}, which draws random numbers")
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        raise Unknown(f"{target}, which writes to what the pass computed")
    args: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
    if target is aten.convolution.default:
        target, args = _as_the_pass_has_it(*args)
    packet = packet_of(target)
    name = tracer.graph._target_to_str(packet.__name__)
    proxy = tracer.create_proxy("call_function", target, args, kwargs, name=name)
    proxy.node.meta["val"] = node.meta.get("val")
    return proxy


def _is_differentiable(node: fx.Node) -> bool:
    """Whether autograd goes back through a part of the results of an operator, or it has no gradient. What an
    operator only keeps for its own backward pass, such as statistics, has none that it should have."""
    index = node.args[1]
    target = target_of(node.all_input_nodes[0])
    value = node.meta.get("val")
    is_one_of_a_kind = len(target._schema.returns) == 1 or target.overloadpacket in _ALL_DIFFERENTIABLE
    if index == 0 or is_one_of_a_kind:
        return True
    return not (isinstance(value, Tensor) and value.is_floating_point())


def _as_the_pass_has_it(
    x: Any, weight: Any, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> tuple[OpOverload, tuple]:  # fmt: skip
    """A convolution as an operator of its own number of dimensions."""
    if transposed:
        target = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
        options = (stride, padding, output_padding, groups, dilation)
        return target[len(stride) - 1], (x, weight, bias, *options)
    target = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    return target[len(stride) - 1], (x, weight, bias, stride, padding, dilation, groups)


def _tracked(value: Tensor, proxy: fx.Proxy, tracer: Any) -> Tensor:
    """A new tensor, that the pass knows as ``proxy``, and that requires a gradient if it can. It is no leaf,
    so it may be written to."""
    result = value.detach()
    if result.is_floating_point():
        result = result.requires_grad_().clone()
    proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=tracer)
    return result


def _input_gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, mask: list[bool],
) -> Any:  # fmt: skip
    """A convolution's gradient for its input alone, as a convolution."""
    if mask[1] or mask[2]:
        return NotImplemented
    dims = len(stride)
    options: Any = (g, weight, None, stride, padding, dilation)
    if transposed:
        return aten.convolution(*options, False, [0] * dims, groups), None, None
    reached = [
        (g.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1
        for i in range(dims)
    ]
    missing = [x.shape[2 + i] - reached[i] for i in range(dims)]
    return aten.convolution(*options, True, missing, groups), None, None


def _table() -> dict[OpOverload, Callable]:
    """The parts of each backward operator, as a function."""
    whole = {
        aten.native_layer_norm.default, aten.native_group_norm.default, aten._fused_rms_norm.default,
        aten._native_batch_norm_legit.no_stats, aten.nll_loss_forward.default,
        aten.nll_loss2d_forward.default, aten.log_sigmoid_forward.default,
    }  # fmt: skip
    table = {
        op: run
        for op, run in decomposition_table.items()
        if isinstance(op, OpOverload) and ("backward" in op.name() or op in whole)
    }
    tied = {op: _tied(table[op]) for op in _TIED if op in table}
    return {**table, **tied, aten.convolution_backward.default: _input_gradient}


def _tied(run: Callable) -> Callable:
    """A backward operator of ``gradient, x, ...`` that has a gradient for ``x``, which is zero. On one device
    a bias that matters in no other way has a gradient of zeros rather than none, and so its weight decay."""

    def backward(gradient: Tensor, x: Tensor, *options: Any, **named: Any) -> Tensor:
        # zero even where x is infinite, and everywhere without a slope, since no x is above 1 and below 0
        return run(gradient, x, *options, **named) + x.clamp(1, 0)

    return backward


# PyTorch says that the second derivative of these is zero
_TIED = (
    aten.threshold_backward.default, aten.leaky_relu_backward.default, aten.hardtanh_backward.default,
    aten.hardsigmoid_backward.default, aten.softshrink_backward.default, aten.hardshrink_backward.default,
    aten.rrelu_with_noise_backward.default, aten.max_pool2d_with_indices_backward.default,
)  # fmt: skip


def _with_slope(run: Callable) -> Callable:
    """An operator that PyTorch writes out under autograd; its derivative too has a gradient of zeros."""
    return lambda x, *options: run(x, *options) + x.clamp(1, 0).square()


_SLOPES_TIED = {
    op: _with_slope(op) for op in (aten.softshrink.default, aten.hardshrink.default, aten.prelu.default)
}
_TABLE = _table()
