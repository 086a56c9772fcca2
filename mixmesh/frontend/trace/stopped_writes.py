"""Refuses writes in place to a value whose gradient is stopped only for the write.

``with torch.no_grad(): y.clamp_(min=0)`` and ``y.detach().clamp_(min=0)`` change the values of ``y`` but not
its gradient. In a graph without writes, the value after the write depends on the detached one: the gradient
would silently be lost. The other way round, ``t.detach().copy_(y)`` gives ``t`` the values of ``y`` without
their gradient: it would silently flow into ``t``, and be lost to what is made of the detached value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from ...errors import TraceError
from .fx_nodes import node_argument, packet_of
from .locate import place_of_stack

aten = torch.ops.aten
DETACH = aten.detach.default
# operators that take only the shape of a tensor: their results have no gradient
LIKE_IT = {
    getattr(aten, name) for name in """zeros_like ones_like empty_like full_like rand_like randn_like
    randint_like new_zeros new_ones new_empty new_full""".split()
}  # fmt: skip


def check_stopped_writes(module: fx.GraphModule) -> None:
    """Raises TraceError, with the line, for such a write to a value with a gradient. ``module`` has no
    ``no_grad`` blocks any more, but may have ``autocast`` blocks."""
    flows = {n for n in module.graph.nodes if getattr(n.meta.get("val"), "requires_grad", False)}
    _check(module, _Seen(flows, {n for n in flows if n.op == "placeholder"}))


@dataclass(frozen=True)
class _Seen:
    """The values seen so far. ``flows`` are those through which a gradient may flow: export marks some that
    have none, made within ``no_grad`` blocks. ``reached`` are those to which a gradient of a parameter
    certainly leads; ``outside`` maps each placeholder of a block to the value that it stands for."""

    flows: set[fx.Node]
    reached: set[fx.Node]
    outside: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def same_memory(self, node: fx.Node) -> list[fx.Node]:
        """``node`` and the values that it is a view of, up to the first whose gradient was stopped."""
        chain = [node]
        while chain[-1].target is not DETACH:
            last = chain[-1]
            base = self.outside.get(last) if last.op == "placeholder" else _argument(last, is_write=False)
            if base is None:
                break
            chain.append(base)
        return chain

    def stopped(self, written: fx.Node) -> fx.Node | None:
        """The value that shares memory with ``written``, but not its gradient. None if there is none, or it
        is a parameter: writes to those are refused anyway."""
        last = self.same_memory(written)[-1]
        if last.target is not DETACH:
            return None
        origin = node_argument(last, 0)
        return None if self.same_memory(origin)[-1].op == "placeholder" else origin

    def gains(self, node: fx.Node, written: fx.Node) -> bool:
        """Whether a node writes a value with a gradient to a detached one."""
        is_stopped = self.same_memory(written)[-1].target is DETACH
        return is_stopped and any(
            _is_float(n) and n in self.reached for n in node.all_input_nodes if n is not written
        )


def _check(module: fx.GraphModule, seen: _Seen) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is DETACH or packet_of(node.target) in LIKE_IT:
            continue
        written = _argument(node, is_write=True)
        if written is not None and seen.stopped(written) in seen.flows:
            raise _refusal(node)
        if written is not None and seen.gains(node, written):
            raise _refusal_of_gain(node)
        for marked in (seen.flows, seen.reached):
            if any(_is_float(n) and n in marked for n in node.all_input_nodes):
                marked.update({node} if written is None else {node, *seen.same_memory(written)})
        _enter_blocks(module, node, seen)


def _enter_blocks(module: fx.GraphModule, node: fx.Node, seen: _Seen) -> None:
    for place, block in enumerate(node.args):
        if not isinstance(block, fx.Node) or block.op != "get_attr":
            continue
        inner = getattr(module, str(block.target))
        if not isinstance(inner, fx.GraphModule):
            continue
        for held, value in zip(inner.graph.find_nodes(op="placeholder"), node.args[place + 1 :]):
            if isinstance(value, fx.Node):
                seen.outside[held] = value
                for marked in (seen.flows, seen.reached):
                    if value in marked:
                        marked.add(held)
        _check(inner, seen)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def _argument(node: fx.Node, *, is_write: bool) -> fx.Node | None:
    """The first argument that an operator writes to (or whose memory its result shares, unless
    ``is_write``)."""
    schema = getattr(node.target, "_schema", None)
    for value, argument in zip(node.args, schema.arguments if schema else ()):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not is_write) and isinstance(value, fx.Node):
            return value
    return None


def _refusal_of_gain(node: fx.Node) -> TraceError:
    return TraceError(
        "a value with a gradient is written where gradients are stopped",
        expected="a value without a gradient, or a copy to write to",
        got=getattr(node.target, "_opname", str(node.target)),
        where=str(place_of_stack(node.meta.get("stack_trace"))),
        hint=(
            "write y.detach(), or under torch.no_grad(), if its gradient ends there",
            "t = x.detach().clone() in place of x.detach(), if the gradient flows through t",
        ),
    )


def _refusal(node: fx.Node) -> TraceError:
    name = getattr(node.target, "_opname", str(node.target))
    return TraceError(
        "a value with a gradient is changed in place where gradients are stopped",
        expected="no write in place under no_grad, or by detach(), to what the loss is made of",
        got=name,
        where=str(place_of_stack(node.meta.get("stack_trace"))),
        hint=(
            "y = y.clamp(min=0) without no_grad, if the gradient is that of the change",
            "y = y + (y.clamp(min=0) - y).detach(), if the gradient passes as if there were none",
        ),
    )
