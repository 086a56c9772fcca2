"""Mutations of a text: each takes the text and a source of randomness and gives another text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

TOKEN = re.compile(r"%?[A-Za-z_][\w.]*|-?\d[\d.eE+-]*|\"[^\"\n]*\"|[^\sA-Za-z0-9]")
NUMBER = re.compile(r"(?<![\w.%])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "64", "1000000000", "4294967296", "1000000000000000000", "9" * 40,
    "9" * 5000, "1e999", "nan", "inf", "-inf", "0.5", "1e-300", "1e300", "true", "false", "none", '"8"', "",
    "[]", "[1, 2]", "%x", "-0.0", "2.0", "0x10", "f32",
)  # fmt: skip
OPERATORS = (
    "import_module.__func__.__call__", "load_library.x", "aten.from_file", "profiler._record_function_enter",
    "aten.add_.Tensor", "aten.__class__", "aten.relu", "aten.linear", "aten.add.Tensor", "aten.unbind.int",
    "aten.lstm.input", "aten.arange", "aten.full", "aten.item", "aten.split.Tensor", "aten.cat",
    "aten.reshape", "aten.mean.dim", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "move",
    "local_slice", "as_partial", "pad_partial", "const", "param", "buffer", "input", "update", "c10d.send",
    "mixmesh.cross_entropy", "mixmesh.sum_exp", "aten.sum", "aten.native_dropout", "aten.repeat", "prim.x",
)  # fmt: skip
PLACEMENTS = (
    "R", "S(0)@r0", "S(1)@r0", "S(0, 2)@r0", "S(0)", "P(sum)", "P(max)", "R@r0", "(R, R)", "()", "S(9)@r0",
    "S(0)@nowhere", "S(0, 0)@r0",
)  # fmt: skip
DTYPES = ("f64", "f32", "bf16", "f16", "f8e4m3", "c64", "i64", "i32", "i8", "u8", "bool", "f33")
ATTRIBUTES = (
    "bucket=0", "bucket=-1", "bucket=1000000000000", 'bucket="a"', "sfb=true", "sfb=1", "reshard=true",
    'reshard="x"', 'wgrad="first"', 'wgrad="last"', 'wgrad="beside"', 'wgrad="never"', "wgrad=3",
    'owned="r0"', 'owned="r9"', 'owned="r0", stage=1', "stage=7", "owned=[1]", "recompute=0",
    "recompute=-1", "recompute=[0]", 'algorithm="padded"', 'algorithm="nothing"', "algorithm=3",
    'gradient_algorithm="list"', "drawn=[0, 0, 0, 8]", "drawn=[1, 9, 9]", "drawn=[]", "drawn=3", "other=1",
)  # fmt: skip

Mutation = Callable[[str, random.Random], str]


def _replace_at(text: str, found: re.Match, new: str) -> str:
    return text[: found.start()] + new + text[found.end() :]


def _any_match(pattern: re.Pattern, text: str, rng: random.Random) -> re.Match | None:
    found = list(pattern.finditer(text))
    return rng.choice(found) if found else None


def change_byte(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    new = rng.choice(["", chr(rng.randrange(32, 127)), "\0", "\n", "\ud7ff", "é", '"', "\\", "%", "٣"])
    return text[:at] + new + text[at + rng.randrange(2) :]


def change_token(text: str, rng: random.Random) -> str:
    one, other = _any_match(TOKEN, text, rng), _any_match(TOKEN, text, rng)
    if one is None or other is None:
        return text
    new = rng.choice(["", other.group(), f"{one.group()} {one.group()}", f"{one.group()}, {other.group()}"])
    return _replace_at(text, one, new)


def change_number(text: str, rng: random.Random) -> str:
    found = _any_match(NUMBER, text, rng)
    return text if found is None else _replace_at(text, found, rng.choice(NUMBERS))


def change_lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(3):
        case 0:
            lines[one], lines[other] = lines[other], lines[one]
        case 1:
            del lines[one]
        case _:
            lines.insert(other, lines[one])
    return "\n".join(lines)


def change_dtype(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"\b(?:f64|f32|i64|bool)\b"), text, rng)
    return text if found is None else _replace_at(text, found, rng.choice(DTYPES))


def change_placement(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"(?<=\] )(?:R|P\(sum\)|S\([\d, ]+\))(?:@\w+)?"), text, rng)
    return text if found is None else _replace_at(text, found, rng.choice(PLACEMENTS))


def change_operator(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"(?<== )[\w.]+(?=\()"), text, rng)
    return text if found is None else _replace_at(text, found, rng.choice(OPERATORS))


def change_arguments(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"(?<=\()[^()\n]*(?=\)(?: \{| :))"), text, rng)
    if found is None:
        return text
    arguments = found.group().split(", ")
    new = rng.choice([*NUMBERS, *arguments, "dim=0", "trainable=3", "keepdim=true", f"[{arguments[0]}]"])
    at = rng.randrange(len(arguments) + 1)
    arguments[at : at + rng.randrange(2)] = [new]
    return _replace_at(text, found, ", ".join(arguments))


def add_attribute(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"\)(?: \{[^}\n]*\})?(?= :)"), text, rng)
    new = f") {{{rng.choice(ATTRIBUTES)}}}"
    return text if found is None else _replace_at(text, found, new)


def nest(text: str, rng: random.Random) -> str:
    found = _any_match(NUMBER, text, rng)
    depth = rng.choice([2, 9, 900, 20_000])
    return text if found is None else _replace_at(text, found, "[" * depth + found.group() + "]" * depth)


def truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def change_value(text: str, rng: random.Random) -> str:
    """Of a header's line ``key = value``, or of a pair of JSON."""
    found = _any_match(re.compile(r"(?:(?<= = )|(?<=\": ))[^\n,{}]+"), text, rng)
    values = [*NUMBERS, '""', "{}", "{ a = 1 }", "[[1, 2, 3]]", "[[1, 1000000000, 1]]", "2020-01-01", '"x"']
    return text if found is None else _replace_at(text, found, rng.choice(values))


def change_key(text: str, rng: random.Random) -> str:
    found = _any_match(re.compile(r"^[\w]+(?= = )|(?<=\")\w+(?=\":)", re.MULTILINE), text, rng)
    return text if found is None else _replace_at(text, found, rng.choice(["x", "order", "name", "points"]))


ANY: tuple[Mutation, ...] = (
    change_byte, change_token, change_number, change_number, change_lines, nest, truncate, change_value,
    change_key,
)  # fmt: skip
OF_PLANS: tuple[Mutation, ...] = (
    *ANY, change_number, change_number, change_dtype, change_placement, change_operator, change_arguments,
    change_arguments, add_attribute,
)  # fmt: skip


def mutate(text: str, rng: random.Random, mutations: tuple[Mutation, ...]) -> str:
    """One to three mutations, one after the other."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        text = rng.choice(mutations)(text, rng)
    return text
