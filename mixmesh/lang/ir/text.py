"""Program text: ``printing`` writes it, ``parse_program`` reads it back equal.

    program    = "program" NAME "world" "=" INT "{" head instruction* "return" VALUE "}"
    head       = ratio* dtype* [levels] [direct]
    ratio      = "ratio" NAME "=" "[" NUMBER,* "]"
    dtype      = "dtype" DTYPE "=" "[" DTYPE,* "]"     the dtype in which each rank computes it
    levels     = "levels" "=" "[" INT,* "]" "from" INT   hierarchical: ranks per machine, least bytes of a sum
    direct     = "direct" "to" INT           one-shot: the most bytes of a sum
    instruction = [result,+ "="] OP "(" argument,* ")" ["{" NAME "=" value,* "}"] [":" type,+]
    result     = VALUE | "_"                     "_" is a result that is not used
    argument   = value | NAME "=" value
    value      = VALUE | NUMBER | STRING | DTYPE | "true" | "false" | "none" | "[" value,* "]"
    type       = DTYPE "[" INT,* "]" placement ["@" NAME]
    placement  = "R" | "P(" NAME ")" | "S(" INT ["," INT] ")"

A comment runs from # to the end of the line and never carries meaning. If it ends with a file and line of the
user's code, as printed comments do, errors of the instruction show these.
"""

from __future__ import annotations

import math

from ...base.units import plural
from . import bounds
from .graph import Arg, DType, Ref
from .instruction import Instruction
from .levels import Levels
from .placement import REPLICATE, Partial, Placement, Ratio, Shard, make_ratio
from .program import Program
from .tokens import Tokens
from .types import DTYPE_BYTES, TensorType, ValueType


def parse_program(text: str, where: str = "<program>") -> Program:
    """Reads program text. Raises ParseError with the line and a caret under the error."""
    return _Parser(text, where).program()


class _Parser(Tokens):
    def __init__(self, text: str, where: str) -> None:
        super().__init__(text, where)
        self.depth = 0  # levels of lists within lists
        self.known_types: dict[TensorType, TensorType] = {}  # equal types share one object

    def program(self) -> Program:
        self.take("name", "program")
        name = self.take("name", what="a name for the program")
        self.take("name", "world")
        self.take("mark", "=")
        place = self.token[2]
        world_size = self.integer("the number of ranks")
        if not 1 <= world_size <= bounds.MAX_RANKS:
            self.fail(place, f"a program of {world_size} ranks", f"1 to {bounds.MAX_RANKS} ranks")
        self.take("mark", "{")
        ratios: dict[str, Ratio] = {}
        while self.accept("ratio"):
            self.ratio(world_size, ratios)
        dtypes: dict[str, tuple[str, ...]] = {}
        while self.accept("dtype"):
            self.dtype_row(world_size, dtypes)
        levels = self.levels(world_size) if self.accept("levels") else None
        direct_bytes = self.direct() if self.accept("direct") else 0
        instructions: list[Instruction] = []
        line_of: dict[str, int] = {}  # for each value, the line that defines it
        while not self.sees("return"):
            if len(instructions) == bounds.MAX_INSTRUCTIONS:
                self.fail(self.token[2], "too many instructions", f"at most {bounds.MAX_INSTRUCTIONS}")
            instructions.append(self.instruction(ratios, line_of))
        self.take("name", "return")
        loss = self.use(line_of)
        self.take("mark", "}")
        self.take("end", what="nothing after the closing brace")
        parsed = tuple(ratios.items()), tuple(instructions), loss
        return Program(
            name,
            world_size,
            *parsed,
            dtypes=tuple(dtypes.items()),
            levels=levels,
            direct_bytes=direct_bytes,
        )

    def ratio(self, world_size: int, ratios: dict[str, Ratio]) -> None:
        place = self.token[2]
        name = self.take("name", what="a name for the ratio")
        if name in ratios:
            self.fail(place, f"ratio {name} is defined twice")
        self.take("mark", "=")
        self.take("mark", "[")
        place = self.token[2]
        shares = self.separated("]", self.number)
        if len(shares) != world_size:
            got = f"{plural(len(shares), 'share')} for {plural(world_size, 'rank')}"
            self.fail(place, got, plural(world_size, "share"))
        beyond = next((s for s in shares if not 0 <= s <= 1), None)
        if beyond is not None or not abs(sum(shares) - 1) <= 1e-3:
            got = f"shares that sum to {sum(shares):g}" if beyond is None else f"a share of {beyond:g}"
            self.fail(place, got, "shares between 0 and 1 that sum to 1")
        ratios[name] = make_ratio(shares)

    def dtype_row(self, world_size: int, dtypes: dict[str, tuple[str, ...]]) -> None:
        place = self.token[2]
        name = self.dtype_name()
        if name in dtypes:
            self.fail(place, f"dtype {name} is defined twice")
        self.take("mark", "=")
        self.take("mark", "[")
        place = self.token[2]
        row = self.separated("]", self.dtype_name)
        if len(row) != world_size:
            self.fail(place, f"{len(row)} dtypes for {world_size} ranks", f"{world_size} dtypes")
        dtypes[name] = tuple(row)

    def levels(self, world_size: int) -> Levels:
        self.take("mark", "=")
        self.take("mark", "[")
        place = self.token[2]
        sizes = tuple(self.separated("]", lambda: self.integer("the ranks of a machine")))
        if sum(sizes) != world_size or 0 in sizes:
            expected = f"at least one for each machine, {world_size} together"
            self.fail(place, f"machines of {', '.join(map(str, sizes)) or 'no'} ranks", expected)
        self.take("name", "from")
        return Levels(sizes, self.integer("the least bytes of a sum"))

    def direct(self) -> int:
        self.take("name", "to")
        return self.integer("the most bytes of a sum")

    def dtype_name(self) -> str:
        place = self.token[2]
        name = self.take("name", what="a dtype")
        if name not in DTYPE_BYTES:
            self.fail(place, f"there is no dtype {name}", ", ".join(DTYPE_BYTES))
        return name

    def instruction(self, ratios: dict[str, Ratio], line_of: dict[str, int]) -> Instruction:
        line = self.token[2][0]
        results: list[str | None] = []
        places = []
        if self.token[0] == "value" or self.sees("_"):
            while True:
                places.append(self.token[2])
                results.append(None if self.accept("_") else self.take("value", what="a result")[1:])
                if not self.accept(","):
                    break
            self.take("mark", "=")
        op = self.take("name", what="an operator")
        self.take("mark", "(")
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []

        def argument() -> None:
            if self.token[0] == "name" and self.tokens[self.at + 1][1] == "=":
                place = self.token[2]
                key = self.take("name")
                self.at += 1
                if any(key == other for other, _ in kwargs):
                    self.fail(place, f"{key} is given twice", "every argument once")
                kwargs.append((key, self.value(line_of)))
            else:
                args.append(self.value(line_of))

        self.separated(")", argument)
        attrs = self.separated("}", lambda: self.pair(line_of)) if self.accept("{") else []
        types = self.types(ratios) if self.accept(":") else ()
        if len(types) != len(results):
            self.fail((line, 1), f"{len(results)} results but {len(types)} types", "one type per result")
        for name, place in zip(results, places):
            if name is None:
                continue
            if name in line_of:
                self.fail(place, f"%{name} is defined twice (first on line {line_of[name]})")
            line_of[name] = line
        parts = tuple(results), types, op, tuple(args), tuple(kwargs), tuple(attrs)
        return Instruction(*parts, self.location(), line)

    def pair(self, line_of: dict[str, int]) -> tuple[str, Arg]:
        key = self.take("name", what="the name of an attribute")
        self.take("mark", "=")
        return key, self.value(line_of)

    def value(self, line_of: dict[str, int]) -> Arg:
        kind, text, place = self.token
        if kind == "value":
            return Ref(self.use(line_of))
        self.at += 1
        if kind == "number":
            return self.convert(text, place)
        if kind == "string":
            return self.string(text, place)
        if kind == "name" and text in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[text]
        if kind == "name" and text in DTYPE_BYTES:
            return DType(text)
        if text == "[":
            if self.depth == bounds.MAX_DEPTH:
                self.fail(place, "lists within lists", f"at most {bounds.MAX_DEPTH} deep")
            self.depth += 1
            items = tuple(self.separated("]", lambda: self.value(line_of)))
            self.depth -= 1
            return items
        self.fail(place, f"unexpected {text!r}", expected="a value, number, string, dtype or list")

    def use(self, line_of: dict[str, int]) -> str:
        place = self.token[2]
        name = self.take("value", what="a value such as %x")[1:]
        if name not in line_of:
            self.fail(place, f"%{name} is used before it is defined")
        return name

    def types(self, ratios: dict[str, Ratio]) -> tuple[TensorType, ...]:
        types = [self.type(ratios)]
        while self.accept(","):
            types.append(self.type(ratios))
        return tuple(types)

    def type(self, ratios: dict[str, Ratio]) -> TensorType:
        place = self.token[2]
        dtype = self.take("name", what="a type such as f32[8, 16] S(0)@r0")
        if dtype not in DTYPE_BYTES:
            self.fail(place, f"unknown dtype {dtype!r}", expected=", ".join(DTYPE_BYTES))
        self.take("mark", "[")
        shape = tuple(self.separated("]", lambda: self.integer("a size")))
        value = ValueType(dtype, shape)
        if len(shape) > bounds.MAX_DIMS:
            self.fail(place, f"a tensor of {len(shape)} dims", f"at most {bounds.MAX_DIMS}")
        # a size of 0 counts as 1: a sum over that dim leaves a tensor of all other sizes
        if math.prod(size or 1 for size in shape) > bounds.MAX_ELEMENTS:
            self.fail(place, f"{value} is too large", f"at most {bounds.MAX_ELEMENTS} elements")
        place = self.token[2]
        placement, ratio = self.placement(value), None
        if self.accept("@"):
            place = self.token[2]
            ratio = self.take("name", what="the name of a ratio")
            if ratio not in ratios:
                self.fail(place, f"unknown ratio {ratio!r}", expected=", ".join(ratios) or "a ratio line")
        elif isinstance(placement, Shard):
            self.fail(place, "a sharded type needs a ratio", expected="S(...)@NAME")
        tensor_type = TensorType(value, placement, ratio)
        return self.known_types.setdefault(tensor_type, tensor_type)

    def placement(self, value: ValueType) -> Placement:
        place = self.token[2]
        name = self.take("name", what="a placement: R, P(sum) or S(dim)")
        if name == "R":
            return REPLICATE
        if name == "P":
            self.take("mark", "(")
            op = self.take("name", what="sum")
            self.take("mark", ")")
            return Partial(op)
        if name != "S":
            self.fail(place, f"unknown placement {name!r}", expected="R, P(sum) or S(dim)")
        self.take("mark", "(")
        numbers = self.separated(")", lambda: self.integer("a dim"))
        if not 1 <= len(numbers) <= 2:
            self.fail(place, "S takes a dim and perhaps a unit", expected="S(dim) or S(dim, unit)")
        dim, unit = numbers[0], (numbers[1] if len(numbers) == 2 else 1)
        if dim >= len(value.shape):
            self.fail(place, f"{value} has no dim {dim}", expected=f"a dim below {len(value.shape)}")
        if unit < 1 or value.shape[dim] % unit:
            self.fail(place, f"dim {dim} of {value} cannot be cut in units of {unit}", "a divisor")
        return Shard(dim, unit)
