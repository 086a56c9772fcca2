"""Compiles a program, for one rank, into straight-line Python.

``RankProgram.source`` is that code, for reading. Instructions in which this rank takes no part are absent,
and a value is dropped after its last use. A redistribution starts at its place and is awaited before its
first use on any rank, because the order in which the forward pass awaits decides the order of the backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MixmeshError
from ..frontend.trace.dtypes import TORCH_DTYPE
from ..lang.ir import (
    Instruction,
    Program,
    Replicate,
    Shard,
    beside_points,
    has_gradient,
    owned_type,
    print_instruction,
    region_of,
    regions,
    wgrad_of,
)
from ..lang.ir.dtypes import on_rank
from ..lang.ir.samples import draws_numbers
from ..lang.rules import EXPERTS, SELECTED
from .comm import Comm
from .direct import DirectCall
from .gradients import wait_now
from .inspection import Inspector
from .layout import Layout, layout
from .local import local_call, local_op
from .owned import Awaited
from .random import RandomPolicy
from .recompute import Region, Step, at_once
from .recording import RecordedComm, Recorder
from .redistribute import Sink, bind
from .reshard import Keeper, reshard_points
from .segments import SMALL, Segment, compiled
from .sfb import Factors, is_sfb, sfb_op
from .wgrad import AtOnce, Receiver, wgrad_op
from .window import Window, local_move

_ODD = re.compile("[^A-Za-z0-9_]")  # characters that may not be in a name of Python's
LocalOp = Callable[[Program, Instruction, int, torch.device, RandomPolicy], Callable[..., tuple]]


@dataclass(frozen=True)
class RankProgram:
    program: Program
    rank: int
    source: str
    lines: dict[int, Instruction] = field(repr=False)  # by line number of the source
    function: Callable = field(repr=False)
    reshards: bool = False

    def run(
        self,
        params: Mapping[str, Tensor | Awaited],
        buffers: dict[str, Tensor],
        inputs: dict[str, Tensor],
        handed: dict[str, Tensor] | None = None,
        shown: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor | None, dict[str, Tensor], list[Tensor]]:
        """Runs the program on local tensors; an owned parameter may be ``Awaited`` (see ``owned``). Returns
        this rank's addend of the loss (None if it has none), new values of buffers, and the tokens that must
        go into the loss (see ``redistribute``).

        A pipeline's stage finds the results of earlier stages among its ``inputs``, by ``transfer_key``, and
        leaves those for later stages in ``handed``, by result. This rank's part of the outputs is left in
        ``shown``, by name.
        """
        updated: dict[str, Tensor] = {}
        tokens: list[Tensor] = []
        keep = Keeper()
        shown = {} if shown is None else shown
        try:
            with keep.hooks() if self.reshards else nullcontext():
                loss = self.function(params, buffers, inputs, updated, tokens, keep, handed, shown)
        except MixmeshError:
            raise
        except Exception as error:
            raise self._located(error) from error
        return loss, updated, tokens

    def _located(self, error: Exception) -> Exception:
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code is not self.function.__code__:
            at = at.tb_next
        if at is None or (instruction := self.lines.get(at.tb_lineno)) is None:
            return error
        values = at.tb_frame.f_locals
        shapes = [_shape_of(values.get(f"v_{_mangle(name)}")) for name in instruction.inputs]
        return MixmeshError(
            f"rank {self.rank}: {instruction.op} failed: {error}",
            got=f"local inputs {', '.join(shapes) or 'none'}",
            where=f"{print_instruction(instruction)}  {instruction.location}".rstrip(),
        )


def compile_program(
    program: Program,
    rank: int,
    comm: Comm,
    device: torch.device,
    random: RandomPolicy,
    *,
    training: bool = True,
    sink: Sink | None = None,
    receiver: Receiver | None = None,
    recorder: Recorder | None = None,
    window: Window | None = None,
    inspector: Inspector | None = None,
    compiles: bool = False,
) -> RankProgram:
    """Compiles the program for ``rank``. Without ``training``, dropout is off.

    ``sink`` takes the gradients of redistributed parameters, to be added when they arrive; without one the
    backward pass waits for each. ``receiver`` takes split weight gradients (``wgrad``). A ``recorder``
    measures every instruction, and an ``inspector`` sees every value. With a ``window`` the program runs on
    that many samples. With ``compiles`` the operators between collectives are compiled together
    (``segments``), unless a recorder or an inspector needs to see each of them.
    """
    program = on_rank(program, rank)
    receiver = AtOnce() if receiver is None else receiver
    writer = _Writer(
        program, rank, comm, device, random, training, sink, receiver, recorder, window, inspector
    )
    if compiles and recorder is None and inspector is None and not writer.reshard:
        writer.segment = Segment()
    for n, instruction in enumerate(program.instructions):
        writer.instruction(n, instruction)
    source = writer.finish()
    names: dict[str, Any] = dict(writer.bound)  # the compiled functions are added to it
    for name, text in writer.segments.items():
        exec(compile(text, f"<{program.name}, rank {rank}, {name}>", "exec"), names)
        names[name] = compiled(names[name])
    exec(compile(source, f"<{program.name}, rank {rank}>", "exec"), names)
    return RankProgram(program, rank, source, writer.origin, names["run"], bool(writer.reshard))


class _Writer:
    """Writes the source; ``bound`` are the objects that it names."""

    def __init__(
        self, program, rank, comm, device, random, training, sink, receiver, recorder, window, inspector
    ) -> None:
        self.program, self.rank, self.comm, self.device, self.random = program, rank, comm, device, random
        self.training, self.sink, self.recorder, self.window = training, sink, recorder, window
        self.receiver, self.inspector = receiver, inspector
        self.beside = {n: b.collective for n, b in beside_points(program).items()}
        if recorder is not None:
            self.comm = RecordedComm.of(comm, recorder)
        self.text = ["def run(params, buffers, inputs, updated, tokens, keep, handed, shown):"]
        self.origin: dict[int, Instruction] = {}
        self.bound: dict[str, object] = {"torch": torch, "sink": sink, "recorder": recorder}
        self.bound["inspector"] = inspector
        self.bound["region"] = self._region
        self.factors = Factors()
        self.held: set[str] = set()
        self.passing: set[str] = set()  # values awaited by this rank although it holds no part of them
        self.reshard = reshard_points(program)
        self.resharded = {name for names in self.reshard.values() for name in names}
        self.records: set[str] = set()  # resharded values whose shards are at hand, to gather from again
        self.pending: dict[str, str] = {}  # value -> code that awaits it
        self.segment: Segment | None = None  # the open segment; None if nothing is compiled
        self.segments: dict[str, str] = {}  # sources by name
        self.bucket_of: dict[str, int] = {}  # by the parameter's value
        self.region_ends = {members[-1]: number for number, members in regions(program).items()}
        self.open_regions: set[int] = set()
        self.last_use = {name: n for n, i in enumerate(program.instructions) for name in i.inputs}
        self.last_use[program.loss] = len(program.instructions)

    def instruction(self, n: int, i: Instruction) -> None:
        self._await(i.inputs, i)
        if i.is_redistribution:
            self._redistribution(n, i)
        elif i.is_leaf:
            self._leaf(n, i)
        elif i.op == "update":
            self._update(i)
        elif i.op == "output":
            self._output(i)
        elif all(name in self.held for name in i.inputs) and self._takes_part(i):
            self._local(n, i)
        for name in dict.fromkeys(i.inputs):
            if name in self.records and self.last_use[name] == n:
                self._line(f"keep.forget({_record(name)})", i)
        for name in self.reshard.get(n, ()):
            self._release(name, i)
        self._look(i)
        self._forget(n, i)

    def finish(self) -> str:
        loss = self.program.loss
        self._await([loss], None)
        t = self.program.types[loss]
        # a loss that every rank holds counts once: its gradient is P, and only the first rank keeps it
        counts = not isinstance(t.placement, Replicate) or self.rank == self.program.participants(t)[0]
        self._line(f"return {self._name(loss) if loss in self.held and counts else None}", None)
        return "\n".join(self.text) + "\n"

    def _line(self, text: str, i: Instruction | None) -> None:
        """Appends a line, after closing the open segment."""
        self._close_segment()
        self._write(text, i)

    def _close_segment(self) -> None:
        """Writes the call of the open segment, if it has operators, and opens a new one."""
        segment = self.segment
        if segment is None or not segment.lines:
            return
        self.segment = Segment()
        if segment.num_operators < SMALL:
            for line in segment.lines:
                self._write(line, None)
        else:
            name = f"segment{len(self.segments)}"
            self.segments[name] = segment.source(name)
            self._write(segment.call(name), None)
        if segment.dropped:
            self._write(f"del {', '.join(segment.dropped)}", None)

    def _write(self, text: str, i: Instruction | None) -> None:
        self.text.append(f"    {text}")
        if i is not None:
            self.origin[len(self.text)] = i

    @staticmethod
    def _name(value: str) -> str:
        return f"v_{_mangle(value)}"

    def _takes_part(self, i: Instruction) -> bool:
        return all(self.rank in self.program.participants(t) for t in i.types)

    def _await(self, names, i: Instruction | None) -> None:
        for name in dict.fromkeys(names):
            if name in self.pending:
                self._line(f"{self._name(name)} = {self.pending.pop(name)}", i)
                self._outside(name, i)
                self._look(self.program.producers[name])

    def _outside(self, name: str, i: Instruction | None) -> None:
        if self.recorder is not None and name in self.held and name in self.program.requires_grad:
            self._line(f"recorder.outside({self._name(name)})", i)

    def _look(self, i: Instruction) -> None:
        """Shows the inspector the result of a leaf or a redistribution, because no operator of this rank
        makes it."""
        if self.inspector is not None and (i.is_leaf or i.is_redistribution):
            if i.result in self.held and i.result not in self.pending:
                self._line(f"inspector.note({i.result!r}, {self._name(i.result)})", i)

    def _leaf(self, n: int, i: Instruction) -> None:
        if not self._takes_part(i):
            return
        if i.op == "const":
            self.bound[f"const{n}"] = self._constant(i)
            value = f"const{n}"
        else:
            where = {"input": "inputs", "param": "params", "buffer": "buffers"}[i.op]
            value = f"{where}[{i.args[0]!r}]"
        if i.op == "param" and owned_type(self.program, i) is not None:
            self.pending[i.result] = f"{value}.wait()"
        else:
            self._write(f"{self._name(i.result)} = {value}", i)  # it can stand before an open segment
        if i.op == "param" and (number := i.attr("bucket", None)) is not None:
            self.bucket_of[i.result] = number
        self.held.add(i.result)

    def _constant(self, i: Instruction) -> Tensor:
        value = i.type.value
        whole = torch.tensor(i.args[0], dtype=TORCH_DTYPE[value.dtype], device=self.device)
        return local_piece(whole.reshape(value.shape), layout(self.program, i.type), self.rank)

    def _update(self, i: Instruction) -> None:
        buffer, value = i.args[0], i.inputs[-1]
        if value in self.held:
            self._line(f"updated[{buffer!r}] = {self._name(value)}.detach()", i)

    def _output(self, i: Instruction) -> None:
        name, value = i.args
        if value.name in self.held:
            graph = "" if has_gradient(i) else ".detach()"
            self._line(f"shown[{name!r}] = {self._name(value.name)}{graph}", i)

    def _local(self, n: int, i: Instruction) -> None:
        plain = self._plain_operator(n, i)
        used = [r for r in i.results if r is not None]
        if used:
            self._call(n, i, plain)
        if self.region_ends.get(n) in self.open_regions:
            self._line(f"del again{self.region_ends[n]}", None)
        self.held.update(used)

    def _call(self, n: int, i: Instruction, plain: Callable[..., tuple]) -> None:
        """Writes the call of a local operator, with everything that looks at it."""
        op = plain
        if self.recorder is not None:
            op = self.recorder.timed(i, plain)
        if self.inspector is not None:
            op = self.inspector.checked(i, plain)
        results = [self._name(r) if r is not None else "_" for r in i.results]
        arguments = [*(["tokens"] if is_sfb(i) else []), *map(self._name, i.inputs)]
        call = f"op{n}"
        self.bound[call] = op
        if (number := region_of(i)) is not None:
            again = plain if self.recorder is None else self.recorder.timed_again(i, plain)
            self.bound[call] = Step(op, i.inputs, i.results, again)
            if number not in self.open_regions:
                self.open_regions.add(number)
                self._line(f"again{number} = region(keep)", i)
            call, arguments = f"again{number}.run", [call, *arguments]
        direct = self.bound.get(call)
        if isinstance(direct, DirectCall):  # without a function of our own around the operator
            text, bound = direct.code(call, arguments.__getitem__)
            self.bound |= bound
            line = f"{', '.join(results)}{',' * direct.returns_list} = {text}"
        else:
            line = f"{', '.join(results)}, = {call}({', '.join(arguments)})"
        if self._can_be_compiled(i, call):
            self._add_to_segment(i, line, results, arguments)
        else:
            self._line(line, i)

    def _plain_operator(self, n: int, i: Instruction) -> Callable[..., tuple]:
        """The local operator, without anything that inspects it."""
        if i.op == "aten.native_dropout" and not (self.training and i.args[2]):
            return _PASS[len(i.results)]
        if is_sfb(i):
            return sfb_op(self.program, i, self.comm, self.sink or wait_now, self.factors)
        op = local_op(self.program, i, self.rank, self.device, self.random, self.window)
        return op if wgrad_of(i) is None else self._apart(n, i, op)

    def _can_be_compiled(self, i: Instruction, call: str) -> bool:
        """Whether ``torch.compile`` may include the operator: it draws no random numbers, which depend on
        more than its inputs, it is not run again, its gradients are the usual ones, and it has no sizes that
        are data, for which it would be compiled again and again."""
        is_plain = call.startswith("op") and not is_sfb(i) and wgrad_of(i) is None
        is_fixed = not draws_numbers(i.op) and i.op not in (EXPERTS, SELECTED)
        return self.segment is not None and is_plain and is_fixed

    def _add_to_segment(self, i: Instruction, line: str, results: list[str], arguments: list[str]) -> None:
        assert self.segment is not None  # checked by _can_be_compiled
        buckets = {self.bucket_of[name] for name in i.inputs if name in self.bucket_of}
        if self.segment.buckets and buckets - self.segment.buckets:
            self._close_segment()
        self.segment.buckets |= buckets
        self.segment.add(line, results, arguments)

    def _apart(self, n: int, i: Instruction, plain: Callable[..., tuple]) -> Callable[..., tuple]:
        local = local_call(self.program, i, self.rank, self.window)
        around = nullcontext if self.recorder is None else partial(self.recorder.apart, i)
        return wgrad_op(i, local, plain, self.receiver, around, self.beside.get(n))

    def _region(self, keep: Keeper) -> Region:
        return Region(self.random, keep, at_once if self.recorder is None else self.recorder.wait)

    def _transfer(self, i: Instruction) -> None:
        """Writes the transfer of a value to another stage of a pipeline, or from another stage (see
        ``pipeline``)."""
        (source,) = i.inputs
        if source in self.held:
            self._line(f"handed[{i.result!r}] = {self._name(source)}", i)
        elif self._takes_part(i):
            self._line(f"{self._name(i.result)} = inputs[{transfer_key(i.result)!r}]", i)
            self.held.add(i.result)

    def _redistribution(self, n: int, i: Instruction) -> None:
        if self.window is not None and i.result in self.window.samples.transfers:
            self._transfer(i)
            return
        how = bind(self.program, i, self.comm)
        if not how.takes_part:
            return
        if i.result in self.beside.values():
            how = replace(how, sent=partial(self.receiver.sent, i.result))
        (source,) = i.inputs
        if self.window is not None and source in self.held:
            move = local_move(self.program, i, self.rank, self.window)
            if move is not None:
                self._move_in_window(n, i, move)
                return
        self.bound[f"move{n}"] = how
        argument = self._name(source) if source in self.held else "None"
        result = self._name(i.result)
        if i.result in self.program.requires_grad:
            self._line(f"{result} = move{n}.start({argument})", i)
            # only for a sharded parameter: other gradients still have to pass the hooks that sum them
            stored = self.program.producers[source].op == "param" and how.src.sizes
            sink = ", sink" if stored else ""
            self.pending[i.result] = f"{result}.finish(tokens{sink})"
            if i.result in self.resharded:
                # through params: the piece's own name is forgotten by then
                piece = f"params[{self.program.producers[source].args[0]!r}]"
                piece = piece if source in self.held else "None"
                record = f"{_record(i.result)} = keep.hold({result}, move{n}, {piece})"
                self.pending[i.result] += f"; {record}"
                self.records.add(i.result)
        else:
            self._line(f"{result} = move{n}.begin({_detached(argument)})", i)
            self.pending[i.result] = f"{result}.wait()"
        if self._takes_part(i):
            self.held.add(i.result)
        else:
            self.passing.add(i.result)

    def _move_in_window(self, n: int, i: Instruction, move: Callable[..., tuple]) -> None:
        """Writes a redistribution that is local within a window of samples."""
        if self._takes_part(i):
            self.bound[f"move{n}"] = move
            self._line(f"{self._name(i.result)}, = move{n}({self._name(i.inputs[0])})", i)
            self.held.add(i.result)

    def _release(self, name: str, i: Instruction) -> None:
        if name in self.records:
            first = i.results[0] if i.results[0] in self.held else None
            result = None if first is None else self._name(first)
            target = result or "_"
            self._line(f"{target} = keep.release({_record(name)}, {result}, tokens)", i)
            self._line(f"del {_record(name)}", None)
            self.records.remove(name)
            if first is not None:
                self._outside(first, i)

    def _forget(self, n: int, i: Instruction) -> None:
        names = dict.fromkeys((*i.inputs, *(r for r in i.results if r is not None)))
        over = [x for x in names if x in self.held | self.passing and self.last_use.get(x, n) <= n]
        self._await(over, i)
        if over:
            variables = [self._name(name) for name in over]
            if self.segment is not None and self.segment.lines:
                self.segment.drop(variables)
            else:
                self._line(f"del {', '.join(variables)}", None)
            self.held.difference_update(over)
            self.passing.difference_update(over)


_PASS: dict[int, Callable[..., tuple]] = {1: lambda x: (x,), 2: lambda x: (x, None)}


def local_piece(whole: Tensor, held: Layout, rank: int) -> Tensor:
    """The piece of a whole tensor that ``rank`` holds: a view, or an empty tensor if it holds nothing."""
    if isinstance(held.placement, Shard):
        return whole.narrow(held.dim, *held.piece(rank))
    return whole if rank in held.ranks else whole.new_empty(0)


def transfer_key(result: str) -> str:
    """The key among a stage's inputs for a result sent by another stage."""
    return f"%{result}"


def _detached(argument: str) -> str:
    return argument if argument == "None" else f"{argument}.detach()"


def _record(name: str) -> str:
    """The name of the record from which a gathered parameter is gathered again."""
    return f"k_{_mangle(name)}"


def _mangle(name: str) -> str:
    return _ODD.sub(lambda found: c if (c := found[0]).isalnum() else f"_{ord(c):x}_", name)


def _shape_of(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else "?"
