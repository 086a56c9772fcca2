"""Which values of a program hold samples, so that a rank can run it on a few of its samples at a time.

A program is traced at the shape of the whole batch, and its constants (the divisor of a mean) are right for
that. On some of a rank's samples it gives some of the rank's addends of the loss, and the addends of all
micro-steps add up to the rank's own. Three things have to be seen to:

- what is summed over the samples of all ranks and depends on inputs only (how many labels count) is worked
  out once per step and *given* to every micro-step;
- what a replicated value adds to a sum (a penalty on the parameters) counts in the first micro-step only;
- what is summed over samples and depends on parameters (the statistics of batch norm) does not exist
  before all samples are through: such a program cannot run in micro-steps;
- what has a row for every sample and is none (a buffer, a range of numbers) is held whole, and sliced in
  every micro-step (``slices``).

Which dims are those of samples follows from the inputs: operators tie what they cut along one factor, and
sizes say nothing.

Where samples move between ranks that have nothing in common, the program is a chain of stages and runs as a
pipeline (``stages``). A micro-batch is then the same samples in every stage, cut between the stage's ranks.
"""

from __future__ import annotations

from collections.abc import Collection
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

LOCAL = ("local_slice", "as_partial", "pad_partial")
RANDOM = (
    "dropout", "bernoulli", "rand", "multinomial", "normal", "uniform", "exponential", "rrelu",
    "aten.poisson.", "aten.binomial", "cauchy", "geometric", "_standard_gamma", "_sample_dirichlet",
)  # fmt: skip
# operators of RANDOM whose numbers are a function of the step and of their own number among the draws: they
# can be drawn again, and in parts
DRAWS = (
    "aten.native_dropout", "aten.bernoulli", "aten.bernoulli.p",
    "aten.rand", "aten.randn", "aten.rand_like", "aten.randn_like",
)  # fmt: skip


def draws_numbers(op: str) -> bool:
    """Whether an operator draws random numbers."""
    return op.startswith("aten.") and any(word in f"{op}." for word in RANDOM)


def draws_once(op: str) -> bool:
    """Whether an operator draws numbers that cannot be drawn again, nor in parts."""
    return draws_numbers(op) and op not in DRAWS


@dataclass(frozen=True)
class Samples:
    """``values`` hold samples: shards cut between them, and addends of sums over them. ``given`` are computed
    once per step. ``meets``: a micro-step has collectives, so all ranks go through as many.

    ``counts`` is samples per rank. For a pipeline there are also the ranks of its ``stages``, in order, and
    the ``transfers``, values that come from an earlier stage.
    """

    batch_size: int
    counts: tuple[int, ...]
    values: frozenset[str]
    given: tuple[str, ...]
    meets: bool
    stages: tuple[Ranks, ...] = ()
    transfers: frozenset[str] = frozenset()

    def hold(self, i: Instruction) -> bool:
        """Whether what an instruction cuts is cut between samples: an operator cuts along one factor."""
        return any(name in self.values for name in (*i.inputs, *i.results))

    def stage_of(self, rank: int) -> int | None:
        """The number of a rank's stage; None outside of all, or without stages."""
        return next((n for n, ranks in enumerate(self.stages) if rank in ranks), None)

    def offset(self, rank: int) -> int:
        """The first of a rank's samples among those of its stage, or of the batch without stages."""
        stages = self.stages or (range(len(self.counts)),)
        beside = next((ranks for ranks in stages if rank in ranks), ())
        return sum(self.counts[r] for r in beside if r < rank)

    def first_sample(self, rank: int, start: int, micro_steps: int) -> int:
        """Where in the batch a micro-step begins that comes after ``start`` samples of a rank. That of a
        pipeline is of samples that follow each other in the batch, so that it is the same in all stages."""
        if not self.stages:
            return self.offset(rank) + start
        before = start * micro_steps // max(self.counts[rank], 1)  # micro-steps
        return before * self.batch_size // micro_steps + self.offset(rank) // micro_steps


def samples_of(program: Program) -> Samples:
    """Raises PlanError, with the instruction and the user's line, for a program that cannot run in
    micro-steps."""
    stages = stages_of(program)
    moved = frozenset(i.result for i in transfers_of(program))
    fixed = _decided_by_inputs(program)
    seeds, values = _cut_between_samples(program, fixed, moved)
    if not seeds:
        raise PlanError(
            "no input is cut between ranks, so there are no samples to take in micro-steps",
            expected="an input held as S(0)",
            hint="plan without accumulation",
        )
    first = min(seeds, key=lambda name: program.types[name].value.shape[0])
    batch_size = program.types[first].value.shape[0]
    counts = shard_sizes(batch_size, program.ratio(program.types[first].ratio))
    if stages:
        counts = _counts_of_stages(program, moved, batch_size)
    once: list[str] = []
    meets = False
    for i in program.instructions:
        _check_operator(program, i)
        if i.is_redistribution:
            role = _role(program, i, values, fixed, moved, in_stages=bool(stages))
            if role is Role.SAMPLES:
                values.add(i.result)
            elif role is Role.GIVEN:
                once.append(i.result)
            meets = meets or role is Role.MEETING
        elif i.op == "output" and (stages or i.inputs[0] not in values):
            raise _refusal(program, i, "shows what is no row of each sample, or rows of a stage")
        elif i.op == "output" and has_gradient(i):
            raise _refusal(program, i, "has a gradient that comes when all micro-steps are over")
        elif is_cut_without_samples(program, i, values):
            raise _refusal(program, i, "is cut between samples, and is none")
        elif any(name in values for name in i.inputs):
            cut = (r for r, t in zip(i.results, i.types) if not isinstance(t.placement, Replicate))
            values.update(r for r in cut if r is not None)
        _check_cut(program, i, values, batch_size, counts, stages)
    if program.loss not in values:
        raise _refusal(program, program.producers[program.loss], "is a loss that is no sum over samples")
    return Samples(batch_size, counts, frozenset(values), tuple(once), meets, stages, moved)


class Role(Enum):
    """How micro-steps see a redistribution."""

    SAMPLES = "its result holds samples of the micro-step"
    GIVEN = "it runs once per step, and its result is given to all micro-steps"
    MEETING = "ranks meet in it in every micro-step"
    LOCAL = "it concerns no other rank, and no samples"


def _role(
    program: Program,
    i: Instruction,
    values: Collection[str],
    fixed: Collection[str],
    moved: Collection[str],
    *,
    in_stages: bool,
) -> Role:
    """The role of a redistribution where ``values`` hold samples, those of ``fixed`` follow from inputs alone
    and ``moved`` come from an earlier stage. Raises PlanError for one that micro-steps cannot run."""
    (source,) = i.inputs
    is_local = bool(local_kind(program, i))
    if i.result in moved:
        if source not in values:
            raise _refusal(program, i, "moves what holds no samples to another stage")
        return Role.SAMPLES
    if is_cut_without_samples(program, i, values):
        raise _refusal(program, i, "is cut between samples before micro-steps take theirs")
    if is_local:
        return Role.SAMPLES if source in values else Role.LOCAL
    if source not in values and not in_stages:
        return Role.MEETING
    if i.result not in fixed:
        if source in values:
            raise _refusal(program, i, "needs the samples of all micro-steps, and depends on parameters")
        raise _refusal(program, i, "moves what depends on parameters, and holds no samples")
    if source in values and in_stages and isinstance(program.types[source].placement, Shard):
        raise _refusal(program, i, "puts samples together, whose order is that of micro-steps")
    return Role.GIVEN


def _check_operator(program: Program, i: Instruction) -> None:
    if i.op == LOCAL_NORM:
        raise _refusal(program, i, "takes statistics of all samples of a rank at once")
    if i.attrs and i.attr("sfb", False):
        raise _refusal(program, i, "gathers the factors of all ranks' samples (sfb)")


def cut_between_samples(program: Program) -> frozenset[str]:
    """Shards that are cut between samples."""
    moved = frozenset(i.result for i in transfers_of(program))
    return frozenset(_cut_between_samples(program, _decided_by_inputs(program), moved)[1])


def is_cut_without_samples(program: Program, i: Instruction, values: Collection[str]) -> bool:
    """Whether an instruction cuts between samples what holds none, and not by slicing what its ranks hold."""
    if len(i.results) != 1 or i.result not in values or i.op == "input":
        return False
    if i.is_leaf:
        return True
    if not i.is_redistribution or local_kind(program, i):
        return False
    return i.inputs[0] not in values


def micro_step_program(program: Program, samples: Samples) -> Program:
    """The part of a program that runs in every micro-step: each value of ``once_program`` is an input
    ``%value``."""
    instructions = [
        Instruction(i.results, i.types, "input", (f"%{i.result}",), location=i.location)
        if any(r in samples.given for r in i.results)
        else i
        for i in program.instructions
    ]
    return replace(program, instructions=_needed(instructions, {program.loss}, sinks=True))


def once_program(program: Program, samples: Samples) -> Program | None:
    """The part of a program that runs once per step: it updates each ``%value`` of the micro-steps. None
    if there is no such part."""
    if not samples.given:
        return None
    instructions = _needed(program.instructions, set(samples.given), sinks=False)
    updates = tuple(Instruction((), (), "update", (f"%{name}", Ref(name))) for name in samples.given)
    return replace(program, instructions=instructions + updates, loss=samples.given[-1])


def _needed(instructions, wanted: set[str], *, sinks: bool) -> tuple[Instruction, ...]:
    kept = []
    for i in reversed(instructions):
        if (i.is_sink and sinks) or any(r in wanted for r in i.results):
            kept.append(i)
            wanted.update(i.inputs)
    return tuple(reversed(kept))


def _decided_by_inputs(program: Program) -> frozenset[str]:
    """Values that neither a parameter nor a random number has part in."""
    open_: set[str] = set()
    for i in program.instructions:
        if i.op == "param" or draws_numbers(i.op) or any(name in open_ for name in i.inputs):
            open_.update(r for r in i.results if r is not None)
    return frozenset(program.types) - open_


def _cut_between_samples(
    program: Program, fixed: frozenset[str], moved: frozenset[str]
) -> tuple[list[str], set[str]]:
    """Shards of inputs, and all shards that an operator ties to one, since it cuts along one factor; so does
    what was ``moved`` between stages."""
    tied: dict[str, str] = {}

    def root(name: str) -> str:
        while tied.get(name, name) != name:
            name = tied[name]
        return name

    def is_cut(name: str | None) -> bool:
        return name is not None and isinstance(program.types[name].placement, Shard)

    from_inputs: set[str] = set()
    seeds: list[str] = []
    for i in program.instructions:
        if i.op == "input" or any(name in from_inputs for name in i.inputs):
            from_inputs.update(r for r in i.results if r is not None)
        cut = [name for name in (*i.inputs, *i.results) if is_cut(name)]
        if i.op == "input" or i.is_redistribution:
            if is_cut(i.result) and i.result in from_inputs and i.result in fixed:
                seeds.append(i.result)
            if i.result in moved:
                tied[root(i.result)] = root(i.inputs[0])
        elif not i.is_leaf:
            for name in cut[1:]:
                tied[root(name)] = root(cut[0])
    roots = {root(name) for name in seeds}
    leading = [name for name in seeds if program.types[name].placement.dim == 0]
    return leading, {name for name in program.types if is_cut(name) and root(name) in roots}


def local_kind(program: Program, i: Instruction) -> str:
    """The kind of a redistribution that moves nothing: one of ``LOCAL``, or "keep" where some ranks go on
    with their whole copy. Empty if it moves anything."""
    source = program.types[i.inputs[0]]
    if not {*program.participants(i.type)} <= {*program.participants(source)}:
        return ""
    if i.op == "move" and isinstance(source.placement, Replicate):
        kinds = {Shard: "local_slice", Partial: "as_partial", Replicate: "keep"}
        return kinds[type(i.type.placement)]
    return i.op if i.op in LOCAL else ""


def _counts_of_stages(program: Program, moved: frozenset[str], batch_size: int) -> tuple[int, ...]:
    """Samples per rank: all of the batch in every stage."""
    counts = [0] * program.world_size
    for name in moved:
        for t in (program.types[name], program.types[program.producers[name].inputs[0]]):
            for rank, size in enumerate(shard_sizes(batch_size, program.ratio(t.ratio))):
                counts[rank] = size or counts[rank]
    return tuple(counts)


def _check_cut(
    program: Program,
    i: Instruction,
    values: set[str],
    batch_size: int,
    counts: tuple[int, ...],
    stages: tuple[Ranks, ...],
) -> None:
    for name, t in zip(i.results, i.types):
        if name not in values:
            continue
        ranks = program.participants(t)
        if stages and ranks not in stages:
            raise _refusal(program, i, f"is on ranks {', '.join(map(str, ranks))}, which are no stage")
        if isinstance(t.placement, Partial):
            continue
        size = t.value.shape[t.placement.dim]
        sizes = shard_sizes(size, program.ratio(t.ratio), t.placement.unit)
        each = size // batch_size
        wanted = tuple(n * each if not stages or r in ranks else 0 for r, n in enumerate(counts))
        if size % batch_size or sizes != wanted:
            raise _refusal(program, i, f"is not cut between samples: {', '.join(map(str, sizes))} of {size}")


def _refusal(program: Program, i: Instruction, why: str) -> PlanError:
    maker = i
    while not maker.location and maker.inputs:  # a redistribution is of no line, but of what it moves
        maker = program.producers[maker.inputs[0]]
    return PlanError(
        f"micro-steps cannot run this program: {i.op} {why}",
        where=f"{print_instruction(i)}  {maker.location}".rstrip(),
        expected="data parallelism or a chain of stages, and no value of the whole batch that depends on "
        "parameters",
        hint="leave it out of outputs="
        if i.op == "output"
        else "plan without accumulation; of batch norm, take group norm",
    )
