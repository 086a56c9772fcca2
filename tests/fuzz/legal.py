"""Random legal programs of a graph: any strategy of any operator, any conversions, any options."""

from __future__ import annotations

import random
from dataclasses import replace

from mixmesh.lang.ir import (
    PARTIAL,
    REPLICATE,
    WGRADS,
    Graph,
    Instruction,
    Levels,
    Node,
    Partial,
    Placement,
    Program,
    Ref,
    Shard,
    TensorType,
    ValueType,
    make_ratio,
    map_refs,
    redistribution,
    separable,
    support,
)
from mixmesh.lang.ir.recompute import updated_buffers
from mixmesh.lang.ir.samples import draws_once
from mixmesh.lang.rules import RULES, Strategy, call_of, shard_units, strategies

from .plans import SKEWED

MOST_REGIONS = 3


class Walk:
    """A program while it is being made: the forms in which every value of the graph is held so far."""

    def __init__(self, graph: Graph, world_size: int, rng: random.Random) -> None:
        self.graph, self.rng, self.world_size = graph, rng, world_size
        self.units = shard_units(graph, RULES)
        self.wholeness = rng.choice((0.1, 0.3, 0.6))  # how often an operator runs whole on all ranks
        self.ratios = {f"r{n}": self.random_ratio() for n in range(rng.choice((1, 1, 2, 3)))}
        self.leaves = {node.result: node for node in graph.nodes if node.is_leaf}
        self.forms: dict[str, list[tuple[str, TensorType]]] = {}
        self.instructions: list[Instruction] = []
        self.count = 0

    def random_ratio(self):
        if self.rng.random() < 0.5:
            return make_ratio(self.rng.choice(SKEWED[self.world_size]))
        return make_ratio([self.rng.choice((0, 1, 1, 2, 5)) for _ in range(self.world_size - 1)] + [1])

    def program(self) -> Program:
        for node in self.graph.nodes:
            if not node.is_leaf:
                self.append_node(node)
        loss = self.held(self.graph.loss, PARTIAL, self.ratio_name())
        ratios = tuple(self.ratios.items())
        return Program(self.graph.name, self.world_size, ratios, tuple(self.instructions), loss)

    def ratio_name(self) -> str:
        return self.rng.choice(("r0", "r0", "r0", *self.ratios))

    def append_node(self, node: Node) -> None:
        ratio = self.ratio_name()
        if node.op == "update":
            if any(leaf.op == "buffer" and leaf.args == node.args[:1] for leaf in self.leaves.values()):
                self.ratios["all"] = make_ratio([1] * self.world_size)
                ratio = "all"  # whoever reads the buffer needs its new value
            name = self.held(node.inputs[0], REPLICATE, ratio)
            self.instructions.append(Instruction((), (), node.op, (node.args[0], Ref(name))))
            return
        strategy = self.strategy(node)
        wanted = dict[str, list[Placement]]()
        for name, placement in zip(node.inputs, strategy.inputs):
            wanted.setdefault(name, []).append(self.in_units(name, placement))
        turns = {name: iter(placements) for name, placements in wanted.items()}

        def taken(ref: Ref) -> Ref:
            return Ref(self.held(ref.name, next(turns[ref.name]), ratio))

        args = map_refs(node.args, taken)
        kwargs = tuple((k, map_refs(v, taken)) for k, v in node.kwargs)
        types = tuple(
            self.type(t, self.in_units(name, p) if name else p, ratio)
            for name, t, p in zip(node.results, node.types, strategy.outputs)
        )
        self.instructions.append(
            Instruction(node.results, types, node.op, args, kwargs, location=node.location)
        )
        for name, t in zip(node.results, types):
            if name is not None:
                self.forms[name] = [(name, t)]

    def strategy(self, node: Node) -> Strategy:
        whole = Strategy("", (REPLICATE,) * len(node.inputs), (REPLICATE,) * len(node.results))
        rule = RULES.get(node.op)
        if rule is None:
            return whole
        allowed = [s for s in strategies(rule, call_of(node, self.graph.types)) if self.is_cuttable(node, s)]
        others = [s for s in allowed if s.factor]
        if not others or self.rng.random() < self.wholeness:
            return allowed[0] if allowed else whole
        # what is held already is taken more often, so that values stay cut over several operators
        fitting = [s for s in others if any(self.is_held(n, p) for n, p in zip(node.inputs, s.inputs))]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.7 else others)

    def is_cuttable(self, node: Node, strategy: Strategy) -> bool:
        placed = [*zip(node.inputs, strategy.inputs), *zip(node.results, strategy.outputs)]
        if any(name is None and isinstance(p, Shard) for name, p in placed):
            return False
        shards = [(name, p.dim) for name, p in placed if isinstance(p, Shard)]
        return all(0 < self.units[name][dim] < self.graph.types[name].shape[dim] for name, dim in shards)

    def is_held(self, name: str, placement: Placement) -> bool:
        return any(
            isinstance(placement, Shard) and t.placement == self.in_units(name, placement)
            for _, t in self.forms.get(name, ())
        )

    def in_units(self, name: str, placement: Placement) -> Placement:
        return (
            Shard(placement.dim, self.units[name][placement.dim])
            if isinstance(placement, Shard)
            else placement
        )

    def type(self, value: ValueType, placement: Placement, ratio: str) -> TensorType:
        everyone = all(self.ratios[ratio])
        named = isinstance(placement, Shard) or not everyone or self.rng.random() < 0.3
        return TensorType(value, placement, ratio if named else None)

    def ranks(self, t: TensorType) -> tuple[int, ...]:
        return tuple(range(self.world_size)) if t.ratio is None else support(self.ratios[t.ratio])

    def cut(self, t: TensorType) -> tuple | None:
        return self.ratios[t.ratio] if isinstance(t.placement, Shard) else None

    # --- forms of values -----------------------------------------------------------------------------------

    def held(self, name: str, placement: Placement, ratio: str) -> str:
        """The name of ``name`` held as ``placement`` by the ranks of ``ratio``, converted if need be."""
        if name not in self.forms:
            self.load(self.leaves[name], placement, ratio)
        wanted = self.type(self.graph.types[name], placement, ratio)
        for held, t in self.forms[name]:
            if (
                t.placement == placement
                and self.ranks(t) == self.ranks(wanted)
                and self.cut(t) == self.cut(wanted)
            ):
                return held
        source = self.rng.choice(self.forms[name])
        if self.rng.random() < 0.2:
            source = self.detour(name, source)
        return self.converted(name, source, wanted)

    def load(self, node: Node, placement: Placement, ratio: str) -> None:
        """A leaf held as it is wanted, or in any other way."""
        if isinstance(placement, Partial) or self.rng.random() < 0.3:
            placement = self.random_placement(node.result)
        if node.op == "const" or isinstance(placement, Partial):
            placement = REPLICATE
        if self.rng.random() < 0.2:
            ratio = self.ratio_name()
        t = self.type(node.types[0], placement, ratio)
        self.instructions.append(Instruction((node.result,), (t,), node.op, node.args, node.kwargs))
        self.forms[node.result] = [(node.result, t)]

    def random_placement(self, name: str) -> Placement:
        shape, units = self.graph.types[name].shape, self.units[name]
        dims = [d for d, size in enumerate(shape) if 0 < units[d] < size]
        return self.rng.choice([REPLICATE, *(Shard(d, units[d]) for d in dims)])

    def detour(self, name: str, source: tuple[str, TensorType]) -> tuple[str, TensorType]:
        """Another form that nobody asked for."""
        t = self.type(self.graph.types[name], self.random_placement(name), self.ratio_name())
        for held in self.forms[name]:
            if held[1] == t:
                return held
        return self.converted(name, source, t), t

    def converted(self, name: str, source: tuple[str, TensorType], wanted: TensorType) -> str:
        held, t = source
        op = self.redistribution(t, wanted)
        if op is None:  # the same but for its name
            return held
        if wanted.placement == PARTIAL and wanted.value.dtype == "bool":
            raise ValueError("a partial sum of booleans")
        self.count += 1
        made = f"{name}.c{self.count}"
        self.instructions.append(Instruction((made,), (wanted,), op, (Ref(held),)))
        self.forms[name].append((made, wanted))
        return made

    def redistribution(self, src: TensorType, dst: TensorType) -> str | None:
        same_ranks = self.ranks(src) == self.ranks(dst)
        cuts = {c for c in (self.cut(src), self.cut(dst)) if c is not None}
        if not same_ranks or len(cuts) > 1:
            return None if same_ranks and src.placement == dst.placement and len(cuts) < 2 else "move"
        if src.placement == dst.placement:
            return None
        return self.rng.choice((redistribution(src.placement, dst.placement),) * 3 + ("move",))


def with_options(program: Program, rng: random.Random) -> Program:
    """``program`` with random options, each only where it is legal."""
    steps = (with_owners, with_reshard, with_regions, with_wgrads, with_sfb, with_sums)
    for step in steps:
        if rng.random() < 0.5:
            program = step(program, rng)
    return program


def changed(program: Program, attrs: dict[int, tuple]) -> Program:
    instructions = tuple(
        replace(i, attrs=(*i.attrs, *attrs[n])) if n in attrs else i
        for n, i in enumerate(program.instructions)
    )
    return replace(program, instructions=instructions)


def with_owners(program: Program, rng: random.Random) -> Program:
    """Some replicated parameters owned, by one more ratio, in one of the stages, and gradients in buckets."""
    shares = make_ratio([rng.choice((0, 1, 3)) for _ in range(program.world_size - 1)] + [1])
    stage, attrs = rng.choice((1, 2)), {}
    for n, i in enumerate(program.instructions):
        if i.op != "param" or i.type.placement != REPLICATE:
            continue
        extra = (("bucket", rng.randrange(3)),) if rng.random() < 0.7 else ()
        fits = i.type.value.shape and {*support(shares)} <= {*program.participants(i.type)}
        if fits and rng.random() < 0.6:
            extra += (("owned", "z"), ("stage", stage))
        attrs[n] = extra
    return changed(replace(program, ratios=(*program.ratios, ("z", shares))), attrs)


def with_reshard(program: Program, rng: random.Random) -> Program:
    gathers = [
        n
        for n, i in enumerate(program.instructions)
        if i.op == "all_gather" and program.producers[i.inputs[0]].op == "param"
    ]
    return changed(program, {n: (("reshard", True),) for n in gathers if rng.random() < 0.7})


def with_regions(program: Program, rng: random.Random) -> Program:
    stale = updated_buffers(program)
    able = [
        n
        for n, i in enumerate(program.instructions)
        if not (i.is_leaf or i.is_redistribution or i.op == "update" or draws_once(i.op))
        and not stale & {*i.inputs}
    ]
    attrs = {}
    for number in range(rng.randint(1, MOST_REGIONS)):
        part = len(able) // MOST_REGIONS
        mine = able[number * part : (number + 1) * part]
        attrs.update({n: (("recompute", number),) for n in mine if rng.random() < 0.8})
    return changed(program, attrs)


def with_wgrads(program: Program, rng: random.Random) -> Program:
    return changed(
        program, {n: (("wgrad", rng.choice(WGRADS)),) for n in separable(program) if rng.random() < 0.7}
    )


def with_sfb(program: Program, rng: random.Random) -> Program:
    """Weight gradients out of gathered factors, for parameters that nothing else uses."""
    attrs = {}
    for n, i in enumerate(program.instructions):
        if i.op != "aten.linear" or i.attrs:
            continue
        x, *params = i.inputs
        t = program.types[x]
        users = [j for j in program.instructions if {*params} & {*j.inputs}]
        whole = all(
            program.producers[p].op == "param"
            and program.types[p].placement == REPLICATE
            and program.producers[p].attr("owned") is None
            and program.participants(program.types[p]) == program.participants(t)
            for p in params
        )
        if (
            isinstance(t.placement, Shard)
            and t.placement.dim < len(t.value.shape) - 1
            and whole
            and len(users) == 1
        ):
            attrs[n] = (("sfb", True),)
    return changed(program, attrs)


def with_sums(program: Program, rng: random.Random) -> Program:
    """How sums over ranks are made: by machines first, or directly."""
    first = rng.randint(1, program.world_size - 1)
    levels = rng.choice((None, Levels((first, program.world_size - first), 0)))
    return replace(program, levels=levels, direct_bytes=rng.choice((0, 100, 10**6)))
