"""Writes an exported program in functional form, and composite operators by what they consist of, one
operator at a time.

PyTorch's ``run_decompositions`` runs the whole program twice more for it, which is half of a trace. Most
operators stay as they are. Here only those run again that do not: composites that PyTorch does not keep, and
writes in place with all that shares memory with what they write. The graph is the same, up to a few names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from .autocast import Autocast, under
from .autocast_blocks import TO_COPY, Casts, casting, is_cast, without_blocks
from .fx_nodes import node_argument, target_of
from .recorder import Recorder, Unknown, check_sizes, stays
from .written import DETACH_IN_PLACE, LIFT, may_share, writes_of

aten = torch.ops.aten


def functional_form(program: ExportedProgram, table: Mapping[Any, Callable]) -> ExportedProgram | None:
    """``program.run_decompositions(table)``, several times as fast. None for a program with something that is
    left to PyTorch, such as a block of its own, a number known only at run time, or a write to a parameter.
    """
    try:
        return _Rewrite(program, table).program()
    except Exception:  # if the program is at fault, PyTorch says what is wrong
        return None


class _Rewrite:
    """The new graph, with the new node and the value of each old node. ``wrapped`` are tensors that are
    written to, or share memory with one: PyTorch's functional tensors keep account of these."""

    def __init__(self, program: ExportedProgram, table: Mapping[Any, Callable]) -> None:
        self.old = program
        self.source = without_blocks(program.graph_module)
        self.graph = fx.Graph()
        self.recorder = Recorder(self.graph, table)
        self.writers, self.shared = writes_of(self.source)
        self.nodes: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.wrapped: dict[fx.Node, Any] = {}
        self.moved: set[fx.Node] = set()  # those with other strides than export saw
        self.seen: set[int] = set()  # the ids of the values of nodes
        self.updates: list[tuple[str, fx.Node]] = []  # written buffers and their new values

    def program(self) -> ExportedProgram:
        old = self.old
        fake_mode = detect_fake_mode([n.meta.get("val") for n in old.graph.find_nodes(op="placeholder")])
        if fake_mode is None:
            raise Unknown("a program without tensors")
        with fake_mode, _without_new_sizes(fake_mode), enable_python_dispatcher(), torch.no_grad():
            for node in self.source.nodes:
                autocast = casting(node)
                if autocast is None or node.target is operator.getitem:
                    self._add(node)
                else:
                    self._add_with_casts(node, autocast)
        self.graph.eliminate_dead_code()
        return ExportedProgram(
            root=old.graph_module,
            graph=self.graph,
            graph_signature=self._signature(),
            state_dict=old.state_dict,
            range_constraints=old.range_constraints,
            module_call_graph=old.module_call_graph,
            example_inputs=old.example_inputs,
            constants=old.constants,
        )

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            new = self.nodes[node] = self.graph.placeholder(node.name)
            new.meta = {"val": None, **node.meta}
            self.values[node] = new.meta["val"]
        elif node.op == "output":
            self.updates = [(target, _copied(new)) for target, new in self._written_buffers()]
            if len({new for _, new in self.updates}) < len(self.updates):
                raise Unknown("two buffers with one value")
            results = (*(new for _, new in self.updates), *self._new(node.args[0]))
            self.graph.output(results).meta = dict(node.meta)
        elif node in self.writers or node in self.shared and any(may_share(node)):
            self._write(node)
        elif node.target is operator.getitem:
            self._pick(node)
        elif node.target is LIFT:
            self._append(node, aten.clone.default, self._new(node.args), {}, node.meta["val"])
        elif node.target is DETACH_IN_PLACE:
            self.nodes[node], self.values[node] = self._now(node.args[0])
        elif (run := self.recorder.decomposition_of(target_of(node))) is not None:
            self._take_apart(node, run)
        else:
            self._copy(node)
        if node in self.shared and node not in self.wrapped:
            self.wrapped[node] = self._wrapped(node)

    def _add_with_casts(self, node: fx.Node, autocast: Autocast) -> None:
        """Adds an operator within an ``autocast`` block, after the casts of its arguments. If its own are not
        cast, those of the operators that it consists of may be."""
        target, context = target_of(node), under(autocast, keeps_casts=False)
        if not is_cast(target, autocast[0]):
            is_taken_apart = self._has_casts(node)
            with context:
                self._take_apart(node, target.decompose) if is_taken_apart else self._add(node)
            return
        if node in self.shared and any(may_share(node)):
            raise Unknown("a write to what is cast")
        arguments = {n: self._now(n) for n in node.all_input_nodes}
        written = {n: self.wrapped.pop(n) for n in arguments if n in self.wrapped}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: arguments[n][1])
        casts = Casts()
        with context, casts:
            target(*args, **kwargs)
        for argument, options, value in casts.made:
            for n, (new, held) in arguments.items():
                if held is argument:
                    self.nodes[n] = self.recorder.append(TO_COPY, (new,), options, value, node.meta)
                    self.values[n] = value
        self._add(node)
        for n, (new, held) in arguments.items():
            self.nodes[n], self.values[n] = new, held
        self.wrapped |= written

    def _has_casts(self, node: fx.Node) -> bool:
        """Whether a composite that stays whole elsewhere has another dtype with the casts within it, as
        ``einsum`` has on a CPU."""
        target, value = target_of(node), node.meta.get("val")
        is_whole = isinstance(target, OpOverload) and _is_cia_op(target) and stays(target)
        if not is_whole or not isinstance(value, Tensor) or node in self.shared:
            return False
        arguments = {n: self._now(n)[1] for n in node.all_input_nodes}
        if target is aten.einsum.default and len({x.dtype for x in arguments.values()}) > 1:
            return True  # only casts make them one; a layer norm takes several
        args, kwargs = fx.map_arg((node.args, node.kwargs), arguments.__getitem__)
        return target(*args, **kwargs).dtype != value.dtype

    def _append(self, node: fx.Node, target: Callable, args: Any, kwargs: Any, value: Any) -> None:
        # inlining a block gives a detached value the example of its source
        if isinstance(value, Tensor) and id(value) in self.seen:
            value = value.detach()
        self.seen.add(id(value))
        new = self.recorder.append(target, args, kwargs, value, node.meta)
        if "val" not in node.meta:
            del new.meta["val"]
        self.nodes[node], self.values[node] = new, value

    def _pick(self, node: fx.Node) -> None:
        index: Any
        made, index = node_argument(node, 0), node.args[1]
        new, values = self._now(made)
        if isinstance(new, tuple):
            self.nodes[node], self.values[node] = new[index], values[index]
        else:
            self._append(node, operator.getitem, (new, index), {}, values[index])
        if made in self.moved:
            self.moved.add(node)

    def _copy(self, node: fx.Node) -> None:
        """Copies an operator. The strides of its result are those without gradients, as in PyTorch's own
        decomposition: on them depends whether a later ``reshape`` is a view."""
        target, value = target_of(node), node.meta.get("val")
        if value is not None and (_is_cia_op(target) or not self.moved.isdisjoint(node.all_input_nodes)):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._now(n)[1])
            value_without_gradients = target(*args, **kwargs)
            check_sizes(value_without_gradients)
            if _strides(value_without_gradients) != _strides(value):
                self.moved.add(node)
                value = value_without_gradients
        self._append(node, target, self._new(node.args), self._new(node.kwargs), value)

    def _take_apart(self, node: fx.Node, run: Callable) -> None:
        for read in node.all_input_nodes:
            self._note(*self._now(read))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        with self.recorder.at(node.meta):
            value = run(*args, **kwargs)
        if value is NotImplemented:
            self._copy(node)
        else:
            self._result(node, value)
            self.moved.add(node)

    def _write(self, node: fx.Node) -> None:
        """Runs an operator on functional tensors."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._wrapped)
        run = target_of(node)
        with self.recorder.at(node.meta), _functional():
            self.wrapped[node] = run(*args, **kwargs)

    def _wrapped(self, node: fx.Node) -> Any:
        if node in self.wrapped:
            return self.wrapped[node]
        new, value = self.nodes[node], self.values[node]
        if isinstance(value, tuple | list) and isinstance(new, fx.Node):
            pick = partial(self.recorder.append, operator.getitem, kwargs={}, origin=node.meta)
            new = self.nodes[node] = tuple(pick((new, i), value=part) for i, part in enumerate(value))
        self._note(new, value)
        return pytree.tree_map_only(Tensor, torch._to_functional_tensor, self.values[node])

    def _now(self, node: Any) -> tuple[Any, Any]:
        """The new node of an old one and its value, after all writes up to here."""
        if node in self.wrapped:
            with self.recorder.at(node.meta):  # a view that is made again has its own place in the file
                self._result(node, pytree.tree_map_only(Tensor, _unwrapped, self.wrapped[node]))
            self.moved.add(node)
        return self.nodes[node], self.values[node]

    def _result(self, node: fx.Node, value: Any) -> None:
        self.values[node] = value
        is_one = not isinstance(value, tuple | list)
        self.nodes[node] = (
            self.recorder.node_of(value) if is_one else tuple(map(self.recorder.node_of, value))
        )

    def _note(self, new: Any, value: Any) -> None:
        for part, held in zip(new, value) if isinstance(new, tuple) else [(new, value)]:
            if isinstance(held, Tensor):
                self.recorder.know(held, part)

    def _new(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda n: self._now(n)[0])

    def _written_buffers(self) -> Iterator[tuple[str, fx.Node]]:
        specs = self.old.graph_signature.input_specs
        for node, spec in zip(self.source.find_nodes(op="placeholder"), specs):
            if node not in self.wrapped or self._now(node)[0].op == "placeholder":
                continue
            if spec.kind is not InputKind.BUFFER or spec.target is None:
                raise Unknown(f"a write to {spec.target or node.name}")
            yield spec.target, self.nodes[node]

    def _signature(self) -> ExportGraphSignature:
        old = self.old.graph_signature
        returned: Any = self.graph.output_node().args[0]
        shown = returned[len(self.updates) :]
        updates = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(name=new.name), target)
            for target, new in self.updates
        ]
        results = [
            OutputSpec(s.kind, TensorArgument(name=new.name) if isinstance(new, fx.Node) else s.arg, s.target)
            for s, new in zip(old.output_specs, shown)
        ]
        return ExportGraphSignature(old.input_specs, updates + results)


def _without_new_sizes(fake_mode: FakeTensorMode) -> AbstractContextManager[None]:
    """A context in which no size that depends on values is kept for what runs on fake tensors later."""
    shape_env = fake_mode.shape_env
    return nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


def _copied(new: fx.Node) -> fx.Node:
    """The value that a buffer is overwritten with, before it is broadcast and cast to those of the buffer."""
    return node_argument(new, 1) if new.target is aten.copy.default else new


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [x.stride() for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _unwrapped(value: Tensor) -> Tensor:
    torch._sync(value)
    return torch._from_functional_tensor(value)


@contextmanager
def _functional() -> Iterator[None]:
    """A context in which writes to functional tensors become operators without writes."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()
