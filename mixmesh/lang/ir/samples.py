"""The values of a program that hold samples, so that a rank can run it on micro-batches of its samples.

A program is traced at the shape of the whole batch, and its constants (the divisor of a mean) are right for
that. On a micro-batch it gives some of the rank's addends of the loss, and those of all micro-batches add up
to the rank's own. But:

- a sum over the samples of all ranks that depends on inputs only (the number of labels that count) is
  computed once per step, and every micro-batch reads it as an input;
- what a replicated value adds to a sum (a penalty on the parameters) counts in the first micro-batch only;
- a sum over samples that depends on parameters (the statistics of batch norm) is complete only after all
  samples: such a program cannot run in micro-batches;
- a value with a row for every sample that is no sample itself (a buffer, a range of numbers) is held whole,
  and every micro-batch slices it (``slices``).

The dims of samples follow from the inputs: an operator ties all that it cuts along one factor. Sizes alone
prove nothing.

If samples move between disjoint sets of ranks, the program is a chain of stages and runs as a pipeline
(``stages``). A micro-batch then has the same samples in every stage, cut between the ranks of the stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace
from enum import Enum

from ...errors import PlanError
from .graph import Ref, has_gradient
from .instruction import Instruction
from .local_norms import LOCAL_NORM
from .placement import Partial, Replicate, Shard, shard_sizes
from .printing import print_instruction
from .program import Program
from .stages import Ranks, stages_of, transfers_of
from .types import rank_sizes

LOCAL = ("local_slice", "as_partial", "pad_partial")
RANDOM = (
    "dropout", "bernoulli", "rand", "multinomial", "normal", "uniform", "exponential", "rrelu",
    "aten.poisson.", "aten.binomial", "cauchy", "geometric", "_standard_gamma", "_sample_dirichlet",
)  # fmt: skip
# operators of RANDOM that can draw the same numbers again, and in parts: their numbers follow from the step
# and from the operator's position among the draws
DRAWS = (
    "aten.native_dropout", "aten.bernoulli", "aten.bernoulli.p",
    "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like",
)  # fmt: skip


def draws_numbers(op: str) -> bool:
    """Whether an operator draws random numbers."""
    return op.startswith("aten.") and any(word in f"{op}." for word in RANDOM)


def draws_once(op: str) -> bool:
    """Whether an operator draws numbers that can be drawn neither again nor in parts."""
    return draws_numbers(op) and op not in DRAWS


@dataclass(frozen=True)
class Samples:
    """The samples of a program. ``counts`` are the samples of each rank.

    ``values`` hold samples: shards cut between them, and addends of sums over them. Values in ``once`` are
    computed once per step. If it ``meets``, micro-batches have collectives, so all ranks run the same number
    of them. A pipeline also has the ranks of its ``stages``, in order, and ``transfers``, values that come
    from an earlier stage.
    """

    batch_size: int
    counts: tuple[int, ...]
    values: frozenset[str]
    once: tuple[str, ...]
    meets: bool
    stages: tuple[Ranks, ...] = ()
    transfers: frozenset[str] = frozenset()

    def hold(self, i: Instruction) -> bool:
        """Whether the shards of an instruction, all cut along one factor, are cut between samples."""
        return any(name in self.values for name in (*i.inputs, *i.results))

    def stage_of(self, rank: int) -> int | None:
        """The number of a rank's stage; None for a rank outside of all stages, or without stages."""
        return next((n for n, ranks in enumerate(self.stages) if rank in ranks), None)

    def offset(self, rank: int) -> int:
        """The position of a rank's first sample among those of its stage, or of the batch without stages."""
        stages = self.stages or (range(len(self.counts)),)
        stage = next((ranks for ranks in stages if rank in ranks), ())
        return sum(self.counts[r] for r in stage if r < rank)

    def first_sample(self, rank: int, start: int, micro_steps: int) -> int:
        """The position in the batch at which the micro-batch after ``start`` samples of a rank begins. A
        pipeline takes consecutive samples of the batch, so that a micro-batch is the same in all stages."""
        if not self.stages:
            return self.offset(rank) + start
        before = start * micro_steps // max(self.counts[rank], 1)  # the number of micro-batches before it
        return before * self.batch_size // micro_steps + self.offset(rank) // micro_steps


@dataclass(frozen=True)
class _Flow:
    """A program with the ranks of its stages, the values that are ``moved`` between stages, and those that
    are ``fixed`` by inputs alone."""

    program: Program
    stages: tuple[Ranks, ...]
    moved: frozenset[str]
    fixed: frozenset[str]

    @classmethod
    def of(cls, program: Program) -> _Flow:
        moved = frozenset(i.result for i in transfers_of(program))
        return cls(program, stages_of(program), moved, _decided_by_inputs(program))


def samples_of(program: Program) -> Samples:
    """Finds the samples of a program. Raises PlanError, with the instruction and the user's line, for a
    program that cannot run in micro-batches."""
    flow = _Flow.of(program)
    seeds, values = _cut_between_samples(program, flow.fixed, flow.moved)
    if not seeds:
        raise PlanError(
            "no input is cut between ranks, so there are no samples to take in micro-batches",
            expected="an input held as S(0)",
            hint="plan without accumulation",
        )
    first = min((program.types[name] for name in seeds), key=lambda t: t.value.shape[0])
    batch_size = first.value.shape[0]
    if flow.stages:
        counts = _counts_of_stages(program, flow.moved, batch_size)
    else:
        counts = rank_sizes(replace(first, placement=Shard(0)), program.ratio(first.ratio))
    roles: dict[str, Role] = {}
    for i in program.instructions:
        _check_operator(program, i)
        if i.is_redistribution:
            roles[i.result] = _role(flow, i, values)
            if roles[i.result] is Role.SAMPLES:
                values.add(i.result)
        else:
            _check_computation(flow, i, values)
            values |= _new_values(i, values)
        _check_cut(flow, i, values, batch_size, counts)
    if program.loss not in values:
        raise _refusal(program, program.producers[program.loss], "is a loss that is no sum over samples")
    once = tuple(name for name, role in roles.items() if role is Role.ONCE)
    meets = Role.MEETING in roles.values()
    return Samples(batch_size, counts, frozenset(values), once, meets, flow.stages, flow.moved)


def _new_values(i: Instruction, values: Set[str]) -> set[str]:
    """The results of a computation that hold samples because its inputs do."""
    if values.isdisjoint(i.inputs):
        return set()
    cut = (r for r, t in zip(i.results, i.types) if not isinstance(t.placement, Replicate))
    return {r for r in cut if r is not None}


class Role(Enum):
    """The role of a redistribution in a program that runs in micro-batches."""

    SAMPLES = "its result holds samples of the micro-batch"
    ONCE = "it runs once per step, and all micro-batches read its result"
    MEETING = "ranks meet in it in every micro-batch"
    LOCAL = "it involves no other rank, and no samples"


def _role(flow: _Flow, i: Instruction, values: Collection[str]) -> Role:
    """The role of a redistribution where ``values`` hold samples. Raises PlanError for one that cannot run in
    micro-batches."""
    (source,) = i.inputs
    program, in_stages = flow.program, bool(flow.stages)
    is_local = bool(local_kind(program, i))
    if i.result in flow.moved:
        if source not in values:
            raise _refusal(program, i, "moves what holds no samples to another stage")
        return Role.SAMPLES
    if is_cut_without_samples(program, i, values):
        raise _refusal(program, i, "is cut between samples before micro-batches take theirs")
    if is_local:
        return Role.SAMPLES if source in values else Role.LOCAL
    if source not in values and not in_stages:
        return Role.MEETING
    if i.result not in flow.fixed:
        if source in values:
            raise _refusal(program, i, "needs the samples of all micro-batches, and depends on parameters")
        raise _refusal(program, i, "moves what depends on parameters, and holds no samples")
    if source in values and in_stages and isinstance(program.types[source].placement, Shard):
        raise _refusal(program, i, "puts samples together, whose order is that of micro-batches")
    return Role.ONCE


def _check_operator(program: Program, i: Instruction) -> None:
    if i.op == LOCAL_NORM:
        raise _refusal(program, i, "takes statistics of all samples of a rank at once")
    if i.attrs and i.attr("sfb", False):
        raise _refusal(program, i, "gathers the factors of all ranks' samples (sfb)")


def _check_computation(flow: _Flow, i: Instruction, values: Collection[str]) -> None:
    if i.op == "output":
        if flow.stages or i.inputs[0] not in values:
            raise _refusal(flow.program, i, "shows what is no row of each sample, or rows of a stage")
        if has_gradient(i):
            raise _refusal(flow.program, i, "has a gradient that comes when all micro-batches are over")
    if is_cut_without_samples(flow.program, i, values):
        raise _refusal(flow.program, i, "is cut between samples, and is none")


def cut_between_samples(program: Program) -> frozenset[str]:
    """The shards that are cut between samples."""
    moved = frozenset(i.result for i in transfers_of(program))
    return frozenset(_cut_between_samples(program, _decided_by_inputs(program), moved)[1])


def is_cut_without_samples(program: Program, i: Instruction, values: Collection[str]) -> bool:
    """Whether an instruction cuts a value between samples although its input holds none, except by slicing
    what its ranks already hold."""
    if len(i.results) != 1 or i.result not in values or i.op == "input":
        return False
    if i.is_leaf:
        return True
    if not i.is_redistribution or local_kind(program, i):
        return False
    return i.inputs[0] not in values


def micro_step_program(program: Program, samples: Samples) -> Program:
    """The part of a program that runs for every micro-batch: each value of ``once_program`` is an input
    ``%value``."""
    instructions = [
        Instruction(i.results, i.types, "input", (f"%{i.result}",), location=i.location)
        if any(r in samples.once for r in i.results)
        else i
        for i in program.instructions
    ]
    return replace(program, instructions=_needed(instructions, {program.loss}, sinks=True))


def once_program(program: Program, samples: Samples) -> Program | None:
    """The part of a program that runs once per step: it updates each ``%value`` that micro-batches read. None
    if there is no such part."""
    if not samples.once:
        return None
    instructions = _needed(program.instructions, set(samples.once), sinks=False)
    updates = tuple(Instruction((), (), "update", (f"%{name}", Ref(name))) for name in samples.once)
    return replace(program, instructions=instructions + updates, loss=samples.once[-1])


def _needed(instructions: Iterable[Instruction], wanted: set[str], *, sinks: bool) -> tuple[Instruction, ...]:
    kept = []
    for i in reversed(tuple(instructions)):
        if (i.is_sink and sinks) or any(r in wanted for r in i.results):
            kept.append(i)
            wanted.update(i.inputs)
    return tuple(reversed(kept))


def _decided_by_inputs(program: Program) -> frozenset[str]:
    """The values that depend neither on a parameter nor on a random number."""
    open_: set[str] = set()
    for i in program.instructions:
        if i.op == "param" or draws_numbers(i.op) or any(name in open_ for name in i.inputs):
            open_.update(r for r in i.results if r is not None)
    return frozenset(program.types) - open_


def _cut_between_samples(
    program: Program, fixed: frozenset[str], moved: frozenset[str]
) -> tuple[list[str], set[str]]:
    """Finds the shards of inputs, and all shards tied to one. Operators cut all their values along one
    factor, and a value that ``moved`` between stages is cut along the same factor on both sides. Returns the
    inputs that are cut along dim 0, and all these shards."""
    shards = {name for name, t in program.types.items() if isinstance(t.placement, Shard)}
    ties = _Ties()
    from_inputs = _from_inputs(program)
    seeds: list[str] = []
    for i in program.instructions:
        if i.op == "input" or i.is_redistribution:
            if i.result in shards and i.result in from_inputs and i.result in fixed:
                seeds.append(i.result)
            if i.result in moved:
                ties.add(i.inputs[0], i.result)
        elif not i.is_leaf:
            ties.add(*(name for name in (*i.inputs, *i.results) if name in shards))
    roots = {ties.root(name) for name in seeds}
    leading = [name for name in seeds if program.types[name].shard.dim == 0]
    return leading, {name for name in shards if ties.root(name) in roots}


def _from_inputs(program: Program) -> set[str]:
    """The inputs and all values that depend on one."""
    names: set[str] = set()
    for i in program.instructions:
        if i.op == "input" or not names.isdisjoint(i.inputs):
            names.update(r for r in i.results if r is not None)
    return names


class _Ties:
    """Sets of tied names (union-find)."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def root(self, name: str) -> str:
        while name in self._parents:
            name = self._parents[name]
        return name

    def add(self, *names: str | None) -> None:
        first, *others = [self.root(name) for name in names if name is not None] or [""]
        for other in others:
            if (root := self.root(other)) != self.root(first):
                self._parents[root] = self.root(first)


def local_kind(program: Program, i: Instruction) -> str:
    """The kind of a redistribution that moves nothing: one of ``LOCAL``, or "keep" if some of the ranks keep
    their whole copy. Empty if it moves anything."""
    source = program.types[i.inputs[0]]
    if not {*program.participants(i.type)} <= {*program.participants(source)}:
        return ""
    if i.op == "move" and isinstance(source.placement, Replicate):
        kinds = {Shard: "local_slice", Partial: "as_partial", Replicate: "keep"}
        return kinds[type(i.type.placement)]
    return i.op if i.op in LOCAL else ""


def _counts_of_stages(program: Program, moved: frozenset[str], batch_size: int) -> tuple[int, ...]:
    """The number of samples of each rank; every stage has the whole batch."""
    counts = [0] * program.world_size
    for name in moved:
        for t in (program.types[name], program.types[program.producers[name].inputs[0]]):
            ratio = program.ratio(t.ratio)
            for rank, size in enumerate(shard_sizes(batch_size, ratio) if ratio else ()):
                counts[rank] = size or counts[rank]
    return tuple(counts)


def _check_cut(
    flow: _Flow, i: Instruction, values: set[str], batch_size: int, counts: tuple[int, ...]
) -> None:
    """Raises PlanError for a result with samples that is not cut between them as the inputs are."""
    program, stages = flow.program, flow.stages
    for name, t in zip(i.results, i.types):
        if name not in values:
            continue
        ranks = program.participants(t)
        if stages and ranks not in stages:
            raise _refusal(program, i, f"is on ranks {', '.join(map(str, ranks))}, which are no stage")
        if isinstance(t.placement, Partial):
            continue
        size = t.value.shape[t.shard.dim]
        sizes = rank_sizes(t, program.ratio(t.ratio))
        each = size // batch_size
        wanted = tuple(n * each if not stages or r in ranks else 0 for r, n in enumerate(counts))
        if size % batch_size or sizes != wanted:
            raise _refusal(program, i, f"is not cut between samples: {', '.join(map(str, sizes))} of {size}")


def _refusal(program: Program, i: Instruction, why: str) -> PlanError:
    maker = i
    # a redistribution has no line of its own, so the line of the moved value is shown
    while not maker.location and maker.inputs:
        maker = program.producers[maker.inputs[0]]
    return PlanError(
        f"micro-batches cannot run this program: {i.op} {why}",
        where=f"{print_instruction(i)}  {maker.location}".rstrip(),
        expected="data parallelism or a chain of stages, and no value of the whole batch that depends on "
        "parameters",
        hint="leave it out of outputs="
        if i.op == "output"
        else "plan without accumulation; where batch norm is what needs the whole batch, take group norm",
    )
