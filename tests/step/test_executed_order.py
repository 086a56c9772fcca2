"""What is simulated is what is executed, in that order: on every rank of a world of processes, the events of
a recorded step are those of the step as a value, one after the other."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import step_programs
import test_golden
import test_recompute
import test_simulated_bytes as bytes_test
import torch
from fuzz.generate import random_source
from fuzz.source import build
from fuzz.steps import in_float64
from gloo_world import run_world
from test_gloo import Mlp, batch

from mixmesh.base.timeline import LOSS_SUM
from mixmesh.cost.outline import Outline, is_factored
from mixmesh.lang.ir import Program, Shard, parse_program, shard_sizes, with_regions
from mixmesh.passes.recomputation import recomputed
from mixmesh.runtime.parallel import parallelize
from mixmesh.runtime.recording import Recorder
from mixmesh.step import AT_THE_END, Await, Compute, Ready, Start, Step, Use, step_of
from mixmesh.step.events import BACKWARD, FORWARD, LOCAL, PRODUCT, REPEATED, WEIGHT, Pass
from mixmesh.step.reach import Ranks, reach
from mixmesh.step.reductions import Reductions

WORLD = bytes_test.WORLD
RANDOM_MODELS = range(950, 962)
NOT_OF_A_STEP = ("broadcast of the loss",)  # ranks outside of the work are told what it is
Entry = tuple[str, str]  # what is done, and the name of the event


class Log(Recorder):
    """What a rank does, in order: computations as they begin, collectives as they start and are awaited."""

    def __init__(self, comm) -> None:
        super().__init__(comm)
        self.entries: list[Entry] = []
        self._title_of: dict[int, str] = {}

    def note(self, what: str, name: str) -> None:
        self.entries.append((what, name))

    @contextmanager
    def span(self, name: str, op: str = "") -> Iterator[None]:
        self.note("compute", name)
        with super().span(name, op):
            yield

    def _enter(self, name: str, op: str) -> None:
        self.note("compute", name)
        super()._enter(name, op)

    def issue(self, channel, call):
        self.note("start", channel.title())
        work = super().issue(channel, call)
        if work is not None:
            self._title_of[id(work)] = channel.title()
        return work

    def finish(self, work, wait) -> None:
        self.note("await", self._title_of[id(work)])
        super().finish(work, wait)


class Executed:
    """A step on every rank, after one that nobody looks at; its log is left in a file. ``make`` gives the
    model and its inputs."""

    def __init__(self, text: str, make: Callable, folder: str) -> None:
        self.text, self.make, self.folder = text, make, folder

    def __call__(self, _) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = self.make()
            planned, _ = parallelize(model, None, parse_program(self.text), device="cpu", timeout_s=30)
            planned(**inputs).backward()
            log = Log(planned.comm)
            with planned.recorded(log):
                planned(**inputs).backward()
        Path(self.folder, os.environ["RANK"]).write_text(json.dumps(log.entries))


@dataclass(frozen=True)
class RandomModel:
    """A model of the fuzz tests: a class, as closures do not pickle."""

    seed: int

    def __call__(self):
        with in_float64():
            return build(str(random_source(self.seed)))


def small_model():
    return Mlp(0), batch(0)


def attention():
    return bytes_test.Attention(), bytes_test.sentences()


def normed():
    return bytes_test.Normed(), bytes_test.pictures()


def branches():
    return bytes_test.Branches(), bytes_test.for_branches()


def language():
    return test_recompute.model_of(), test_recompute.batch()


def golden_mlp():
    torch.manual_seed(0)
    return test_golden.MLP(), {"x": torch.randn(8, 8), "y": torch.arange(8) % 4}


def golden_attention():
    torch.manual_seed(0)
    return test_golden.Attention(), {"tokens": torch.arange(48).reshape(8, 6) % 30}


def named_cases() -> dict[str, tuple[str, Callable]]:
    """By name the text of a program, and what makes its model."""
    makers = {"tokens.weight": attention, "norm2.weight": normed, "shortcut.0.weight": branches}
    cases = {}
    for name, text in bytes_test.all_programs().items():
        cases[name] = text, next((make for key, make in makers.items() if key in text), small_model)
    for path in sorted((step_programs.TESTS / "golden").glob("*.txt")):
        make = golden_mlp if path.stem.startswith("mlp") else golden_attention
        cases[f"golden {path.stem}"] = path.read_text(), make
    for name, plan in step_programs.language_plans():
        if isinstance(plan, Program):
            cases[name] = str(plan), language
    return cases


def random_cases() -> Iterator[tuple[str, tuple[str, Callable]]]:
    """Programs in which all ranks hold something of all that they take part in: PyTorch leaves some of what
    it does out for empty tensors. Nothing is computed again, or out of factors, in a way that is no use, as
    chance has it: what does not lead to the loss on a rank."""
    for name, program in step_programs.random_programs(RANDOM_MODELS, (WORLD,)):
        seed, _, number = name.split()[1].partition(".")
        plain = with_regions(program, {})
        if has_empty_pieces(plain) or has_needless_factors(plain) or not runs(RandomModel(int(seed))):
            continue
        even = not reach(Outline(plain))
        chosen = recomputed(plain) if int(number) % 2 and even else plain
        yield name, (str(chosen), RandomModel(int(seed)))


@cache
def runs(make: RandomModel) -> bool:
    """Whether the model takes its own inputs: indices may be larger than a table."""
    model, inputs = make()
    try:
        model(**inputs).backward()
    except (IndexError, RuntimeError):
        return False
    return True


def has_needless_factors(program: Program) -> bool:
    return any(is_factored(i) and i.result not in program.requires_grad for i in program.instructions)


def has_empty_pieces(program: Program) -> bool:
    for t in program.types.values():
        if isinstance(t.placement, Shard):
            sizes = shard_sizes(t.value.shape[t.placement.dim], program.ratio(t.ratio), t.placement.unit)
            if not all(sizes[rank] for rank in program.participants(t)):
                return True
    return False


# --- what the step says -----------------------------------------------------------------------------------


def once(entries: Iterable[Entry]) -> list[Entry]:
    """Each entry once: where it is first, as a computation that waits goes on under its name, and a
    collective may be several transfers; of awaits where it is last."""
    every = list(entries)
    first = {entry: n for n, entry in reversed([*enumerate(every)])}
    last = {entry: n for n, entry in enumerate(every)}
    kept = [entry for n, entry in enumerate(every) if (last if entry[0] == "await" else first)[entry] == n]
    # what is awaited at one place is awaited in whatever order
    runs = [list(run) for _, run in itertools.groupby(kept, lambda entry: entry[0] == "await")]
    return [entry for run in runs for entry in (sorted(run) if run[0][0] == "await" else run)]


def expected(program: Program, rank: int) -> Iterator[Entry]:
    """What a rank does in a step, in order."""
    step = step_of(Outline(program))
    sums = step.reductions(program, program.buckets)
    for name, exchange in sums.gathers:
        if rank in exchange.ranks:
            yield "start", name
    yield from of_pass(step, step.forward, sums, rank)
    if len(program.working_ranks) > 1 and rank in program.working_ranks:
        yield "start", LOSS_SUM
    yield from of_pass(step, step.backward, sums, rank)
    for late in (False, True):
        yield from issued(sums, AT_THE_END, rank, late)


def of_pass(step: Step, order: Pass, sums: Reductions, rank: int) -> Iterator[Entry]:
    program, events = order.program, order.script.events
    on = reach(step.outline)
    meets = {e.value for e in events if isinstance(e, Start) and is_collective(e) and is_met(order, e, rank)}
    fetched: set[str] = set()
    for n, event in enumerate(events):
        if isinstance(event, Compute):
            of = following(order, n) if event.part == REPEATED else event
            if takes_part(program, of, rank, on):
                if event.part == REPEATED or (event.part == WEIGHT and event.at not in step.later):
                    yield reached(order, n)
                yield "compute", order.name_of(event)[0]
        elif isinstance(event, Start) and is_collective(event):
            if is_met(order, event, rank):
                if event.part == PRODUCT:
                    yield reached(order, n)
                yield "start", event.name
                if event.value and not receives(program, event, rank, on):
                    yield "await", event.name
        elif isinstance(event, Await) and event.name in meets and receives(program, event, rank, on):
            if event.part == REPEATED:
                yield reached(order, n)
            yield "await", event.name
        elif isinstance(event, Ready):
            yield from issued(sums, event.point, rank, False)
        elif isinstance(event, Use):
            name, exchange = sums.gathers[sums.gather_of[event.name]]
            if rank in exchange.ranks and name not in fetched:
                fetched.add(name)
                yield "await", name


def receives(program: Program, event: Start | Await, rank: int, on: Mapping[str, Ranks]) -> bool:
    """Whether a rank awaits what comes back where the others do; one that only sends its addend of a gradient
    awaits at once that it has been sent."""
    if event.part != BACKWARD:
        return True
    source = program.instructions[event.at].inputs[0]
    return rank in on.get(source, program.participants(program.types[source]))


def reached(order: Pass, n: int) -> Entry:
    """What a recorder sees before event ``n``, which is part of a computation's backward: that autograd has
    reached that. It makes a weight's gradient, gathers factors, awaits a parameter or runs a region again
    before it makes the gradients of inputs."""
    return "compute", order.name_of(following(order, n))[0]


def following(order: Pass, n: int) -> Compute:
    """The computation whose backward is next."""
    return next(e for e in order.script.events[n:] if isinstance(e, Compute) and e.part == BACKWARD)


def takes_part(program: Program, event: Compute, rank: int, on: Mapping[str, Ranks]) -> bool:
    """Whether a rank has a computation; ``on`` are the ranks of gradients, if some get none."""
    i = program.instructions[event.at]
    held = [r for r in i.results if r is not None and rank in program.participants(program.types[r])]
    return any(event.part == FORWARD or rank in on.get(r, (rank,)) for r in held)


def is_collective(event: Start) -> bool:
    return event.number != LOCAL


def is_met(order: Pass, event: Start, rank: int) -> bool:
    return rank in order.exchanges[event.number][0].ranks


def issued(sums: Reductions, point: float, rank: int, late: bool) -> Iterator[Entry]:
    for number, ranks in sums.issues.get(point, ()):
        if rank in ranks and (number in sums.late) == late:
            yield "start", sums.names[number]


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """By name the program, and the log of each rank."""
    cases = named_cases() | dict(random_cases())
    folders = {name: tmp_path_factory.mktemp("ranks") for name in cases}
    checks = {name: Executed(*case, str(folders[name])) for name, case in cases.items()}
    for name, failures in run_world(WORLD, checks).items():
        assert not any(failures), name + "\n" + "\n".join(f for f in failures if f)
    return {
        name: (
            parse_program(text),
            [[*map(tuple, json.loads((folders[name] / str(rank)).read_text()))] for rank in range(WORLD)],
        )
        for name, (text, _) in cases.items()
    }


def check(name: str, program: Program, logs: list[list[Entry]]) -> None:
    for rank, log in enumerate(logs):
        said = once(expected(program, rank))
        awaited = {entry for entry in said if entry[0] == "await"}
        # sums and gradients of stored parameters are taken in as they arrive, at the end at the latest
        seen = [e for e in once(log) if e[1] not in NOT_OF_A_STEP and (e[0] != "await" or e in awaited)]
        assert seen == said, f"{name}, rank {rank}"


def test_a_log_has_everything(executed):
    """Awaits, starts and computations of either pass, second runs and gathers, weights apart, factors."""
    entries = {
        (what, name.split()[-1]) for _, logs in executed.values() for log in logs for what, name in log
    }
    assert {("await", "grad"), ("start", "grad"), ("compute", "again"), ("start", "again")} <= entries
    assert {("compute", "grad"), ("start", "factors"), ("await", "again")} <= entries


@pytest.mark.parametrize("kind", ["golden", "language", "random", ""])
def test_the_order_is_that_of_the_step(executed, kind):
    kinds = ("golden", "language", "random")
    every = [name for name in executed if (name.startswith(kind) if kind else not name.startswith(kinds))]
    assert len(every) >= (6 if kind == "golden" else 15)
    for name in every:
        check(name, *executed[name])
