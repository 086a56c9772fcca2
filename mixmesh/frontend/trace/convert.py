"""Converts an exported program to nodes: leaves have the model's own names, operators those of ATen."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from ...errors import TraceError
from ...lang.ir import Arg, DType, Graph, Node, Ref, ValueType
from .capture import Capture
from .checkpoints import region_of_stack
from .detached_data import changed_parameter
from .dtypes import DTYPE_NAME
from .failures import INSTEAD_OF_UNIQUE, NO_MESSAGES
from .fx_nodes import node_argument
from .locate import place_of_function, place_of_stack
from .schema import op_name
from .stand_ins import without_values
from .symbolic import Sizes, written_out

MAX_CONST_ELEMENTS = 65536
# a hint for 1j * x, x.fill_(1j) and torch.tensor([1j])
HOLD_COMPLEX = 'keep the number in a buffer of the module: self.register_buffer("unit", torch.tensor(1j))'
INSTEAD_OF_COUNTS = "torch.bincount(x, minlength=n), or F.one_hot(x, n).sum(0), of values below n"
SIZE_OF_REPEATED = (
    "say how many there are in all, where that is fixed: x.repeat_interleave(counts, dim, output_size=n)"
)
INSTEAD_OF_MASKS = "for this operator replace x[mask] with torch.where or a multiplication by the mask"
INSTEAD = {"bincount": INSTEAD_OF_COUNTS, "unique": INSTEAD_OF_UNIQUE, "repeat_interleave": SIZE_OF_REPEATED}
CHANGE_A_COPY = (
    "change a copy: x = x.clone()",
    "where that is a library's code: a model of your own around it, which gives it a copy",
)
WRAPPED = "model."  # the prefix that LossAndOutputs adds to names


def convert(captured: Capture, model: nn.Module, sizes: Sizes | None = None) -> Graph:
    """Converts the program in its own order, but leaves come first, and updates of buffers and outputs
    last. ``sizes`` are the numbers of sizes that are symbols."""
    return _Converter(captured, model, sizes).graph(graph_name(model))


def graph_name(model: nn.Module) -> str:
    return re.sub(r"[^a-z0-9_]", "_", type(model).__name__.lower()).strip("_") or "model"


def nodes_of_checks(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that check a value, as ``torch._check(mask.sum() == n)`` does, and those that compute numbers
    only for them: no result depends on any of these."""
    checks: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        is_number = node.op == "call_function" and isinstance(value, NUMBERS)
        if value is None and node.target in ASSERTIONS or is_number and checks.issuperset(node.users):
            checks.add(node)
        if node.target is torch.ops.higher_order.with_effects and node.args[1] in CHECKS_IN_ORDER:
            checks.update((node, *node.users))  # which are tokens of the order alone
    return checks


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
ASSERTIONS = frozenset({
    torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg, torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
})  # fmt: skip


# checks that export keeps in their order, as effects: of torch.linalg.solve, inv and cholesky
CHECKS_IN_ORDER = frozenset({torch.ops.aten._linalg_check_errors.default})

MESSAGES = "_c10d_functional"  # the operators that calls of torch.distributed become while they are traced


class Names:
    """Unique names of values, made of letters, digits, underscores and dots."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        self.used = set(used)

    def new(self, wanted: str) -> str:
        """Reserves and returns ``wanted`` if it is free, or else a new name that begins with it."""
        base = re.sub(r"[^A-Za-z0-9_.]", "_", wanted) or "value"
        name, n = base, 0
        while name in self.used:
            n += 1
            name = f"{base}_{n}"
        self.used.add(name)
        return name


class _Converter:
    """Builds the nodes. ``single`` maps fx nodes to the names of their values; ``several`` maps fx nodes with
    several values to a name for each, None for unused ones."""

    def __init__(self, captured: Capture, model: nn.Module, sizes: Sizes | None) -> None:
        self.number_of = sizes if sizes is not None else lambda size: size
        self.program = captured.program
        self.inputs = iter(captured.inputs)
        self.input_of = dict(zip(captured.program.graph_signature.user_inputs, captured.inputs))
        self.outputs_named = captured.outputs
        self.model = model
        self.names = Names()
        self.checks = nodes_of_checks(captured.program.graph)
        self.nodes: list[Node] = []
        self.single: dict[fx.Node, str] = {}
        self.several: dict[fx.Node, tuple[str | None, ...]] = {}
        self.leaf_of: dict[tuple[str, str], str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.tensors = parameters | buffers
        # a tensor with several names is called by the first
        self.first_name: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            self.first_name.setdefault(id(tensor), name)

    def graph(self, name: str) -> Graph:
        specs = iter(self.program.graph_signature.input_specs)
        loss = ""
        for node in (n for n in self.program.graph.nodes if n not in self.checks):
            match node.op:
                case "placeholder":
                    self.leaf(node, next(specs))
                case "call_function":
                    self.call(node)
                case "output":
                    loss = self.outputs(node)
                case _:
                    self.refuse(node, f"{node.op} {node.target}", "plain operators")
        return Graph(name, tuple(self.nodes), loss)

    def leaf(self, node: fx.Node, spec: InputSpec) -> None:
        target = spec.target or ""  # the name of a leaf other than a user input
        kwargs: tuple[tuple[str, Arg], ...] = ()
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                op = "param" if spec.kind is InputKind.PARAMETER else "buffer"
                tensor = self.tensors[target.removeprefix(WRAPPED)]
                key = self.first_name[id(tensor)]
                if op == "param" and not tensor.requires_grad:
                    kwargs = (("trainable", False),)
            case InputKind.TOKEN:
                for user in node.users:
                    if user.op != "output" and user not in self.checks:
                        self.refuse(
                            user, "an operator with an effect of its own", "operators that only compute"
                        )
                return
            case InputKind.USER_INPUT:
                op, key = "input", next(self.inputs)
            case InputKind.CONSTANT_TENSOR:
                op, key = "const", target.split(".")[-1]
            case InputKind.CUSTOM_OBJ if isinstance(self.program.constants.get(target), torch.Generator):
                self.refuse(
                    next(iter(node.users), node),
                    "a draw from a torch.Generator of the model's own",
                    "a forward pass that draws from torch's own random numbers: no generator is in a program",
                    "torch.rand(size) without generator=, or numbers drawn with the batch: "
                    "mixmesh.prepare(..., inputs=lambda x, y: (x, y, torch.rand(len(x), generator=g)))",
                )
            case _:
                raise TraceError(f"the model needs {spec.kind.name.lower()} {spec.target}, not a tensor")
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return  # a constant in the batch
        if (op, key) not in self.leaf_of:
            self.leaf_of[op, key] = self.names.new(key)
            args = (self.constant(target, node),) if op == "const" else (key,)
            result = self.leaf_of[op, key]
            self.nodes.append(Node((result,), (self.type(value, node),), op, args, kwargs))
        self.single[node] = self.leaf_of[op, key]

    def constant(self, target: str, node: fx.Node) -> Arg:
        tensor = self.program.constants[target]
        if tensor.numel() > MAX_CONST_ELEMENTS:
            raise TraceError(
                f"the constant {target.removeprefix(WRAPPED)} is too large to stand in program text",
                expected=f"at most {MAX_CONST_ELEMENTS} elements",
                got=f"a tensor of shape {list(tensor.shape)}",
                hint="register it as a buffer of the module: self.register_buffer(name, tensor)",
            )
        if tensor.is_meta:
            raise without_values(target.removeprefix(WRAPPED), tensor)
        if tensor.is_complex():
            kind = f"a complex constant of shape {list(tensor.shape)}"
            self.refuse(next(iter(node.users), node), kind, "real numbers in program text", HOLD_COMPLEX)
        return tuple(tensor.detach().cpu().flatten().tolist())

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            name = self.several[node_argument(node, 0)][_index(node)]
            if name is not None:
                self.single[node] = name
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            self.refuse(node, str(getattr(node.target, "__name__", node.target)), "plain operators")
        if node.target.namespace == MESSAGES:
            got = f"{node.target.__name__.partition('.')[0]}, a message between ranks"
            self.refuse(node, got, "operators that only compute", NO_MESSAGES)
        value = node.meta.get("val")
        results: tuple[str | None, ...] = ()
        types: tuple[ValueType, ...] = ()
        if isinstance(value, torch.Tensor):
            self.single[node] = self.names.new(node.name)
            results, types = (self.single[node],), (self.type(value, node),)
        elif isinstance(value, tuple | list):
            results = self.several[node] = self.names_of_several(node, len(value))
            types = tuple(self.type(v, node) for v in value)
        elif value is not None:  # assertions have None as their result
            self.refuse(
                node,
                f"{op_name(node.target)} reads a tensor's value",
                "shapes and numbers fixed",
                "keep the tensor in place of x.item(), x.tolist() or int(x); what decides on shapes comes "
                "into the batch as a number, not as a tensor",
            )
        stack = node.meta.get("stack_trace")
        place, region = place_of_stack(stack), region_of_stack(stack)
        args = written_out(node.target, tuple(self.arg(a, node) for a in node.args))
        kwargs = tuple((k, self.arg(v, node)) for k, v in node.kwargs.items())
        if node.target is torch.ops.aten.repeat_interleave.Tensor:  # repeats may be known here alone
            kwargs = (("output_size", types[0].shape[0]),)
        self.nodes.append(
            Node(results, types, op_name(node.target), args, kwargs, place.location, place.source, region)
        )

    def names_of_several(self, node: fx.Node, count: int) -> tuple[str | None, ...]:
        picks = [u for u in node.users if u.target is operator.getitem]
        whole = len(picks) < len(node.users)  # an operator reads the list as a whole
        used = {_index(u) % count for u in picks if u.users}
        one = len(used) == 1 and not whole
        return tuple(
            self.names.new(node.name if one else f"{node.name}.{i}") if whole or i in used else None
            for i in range(count)
        )

    def arg(self, arg: Any, node: fx.Node) -> Arg:
        match arg:
            case fx.Node():
                if arg in self.several:
                    return tuple(Ref(v) for v in self.several[arg] if v is not None)
                if arg not in self.single:
                    self.refuse(node, f"{arg.name}, a number known only at run time", "fixed numbers")
                return Ref(self.single[arg])
            case torch.dtype():
                return DType(DTYPE_NAME[arg])
            case None | torch.device() | torch.layout() | torch.memory_format():
                return None
            case float() if arg != arg:
                return math.nan  # one object for all, so that nodes with it compare equal
            case bool() | int() | float() | str():
                return arg
            case tuple() | list():
                return tuple(self.arg(a, node) for a in arg)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                number = self.number_of(arg)
                if isinstance(number, float | int):  # and no symbol any more
                    return number
        self.refuse(
            node,
            f"an argument {arg!r}",
            "tensors, real numbers, strings, dtypes and lists of them",
            HOLD_COMPLEX if isinstance(arg, complex) else "",
        )

    def type(self, value: Any, node: fx.Node) -> ValueType:
        if value is None:
            return ValueType("f32", (0,))  # an optional result that is absent
        if value.dtype not in DTYPE_NAME:
            self.refuse(node, f"dtype {value.dtype}", ", ".join(DTYPE_NAME.values()))
        shape = tuple(map(self.number_of, value.shape))
        if not all(type(size) is int for size in shape):
            self.refuse(
                node,
                f"{node.name} of shape {list(value.shape)}, known only at run time",
                "shapes that do not depend on values",
                next((hint for name, hint in INSTEAD.items() if name in str(node.target)), INSTEAD_OF_MASKS),
            )
        return ValueType(DTYPE_NAME[value.dtype], shape)

    def outputs(self, node: fx.Node) -> str:
        shown: list[str] = []
        values: Any = node.args[0]
        for value, spec in zip(values, self.program.graph_signature.output_specs):
            match spec.kind:
                case OutputKind.USER_OUTPUT:
                    shown.append(self.single[value])
                case OutputKind.TOKEN:
                    continue
                case OutputKind.BUFFER_MUTATION:
                    tensor = self.tensors[(spec.target or "").removeprefix(WRAPPED)]
                    name = self.first_name[id(tensor)]
                    fitting = self.fit(self.single[value], self.type(value.meta["val"], value), tensor)
                    self.nodes.append(Node((), (), "update", (name, fitting)))
                case _:
                    name = self.input_of.get(spec.target or "") or (spec.target or "").removeprefix(WRAPPED)
                    where = str(place_of_stack(value.meta.get("stack_trace")))
                    if isinstance(self.tensors.get(name), torch.nn.Parameter):
                        raise changed_parameter(name, where)
                    raise TraceError(
                        f"the model's forward pass changes what it was given: {name}",
                        expected="changes of buffers only",
                        where=where,
                        hint=CHANGE_A_COPY,
                    )
        loss, *others = shown
        for name, value in zip(self.outputs_named, others):
            self.nodes.append(Node((), (), "output", (name, Ref(value))))
        return loss

    def fit(self, value: str, held: ValueType, buffer: torch.Tensor) -> Ref:
        """Casts and broadcasts ``value`` to the dtype and shape of a buffer, as ``buffer.copy_(value)`` does:
        export gives the value before this conversion."""
        wanted = ValueType(DTYPE_NAME[buffer.dtype], tuple(buffer.shape))
        if held.dtype != wanted.dtype:
            cast = ValueType(wanted.dtype, held.shape)
            kwargs = (("dtype", DType(wanted.dtype)),)
            name = self.names.new(f"{value}.to_copy")
            self.nodes.append(Node((name,), (cast,), "aten._to_copy", (Ref(value),), kwargs))
            value = name
        if held.shape != wanted.shape:
            name = self.names.new(f"{value}.expand")
            self.nodes.append(Node((name,), (wanted,), "aten.expand", (Ref(value), wanted.shape)))
            value = name
        return Ref(value)

    def refuse(self, node: fx.Node, got: str, expected: str, hint: str | tuple[str, ...] = "") -> NoReturn:
        own = str(place_of_stack(node.meta.get("stack_trace")))
        where = own or str(place_of_function(type(self.model).forward))
        raise TraceError("the model cannot be traced", expected=expected, got=got, where=where, hint=hint)


def _index(getitem: fx.Node) -> int:
    index = getitem.args[1]
    assert isinstance(index, int)
    return index
