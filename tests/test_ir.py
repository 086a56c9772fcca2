"""Program text, shards and placements."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import MLP, programs

from mixmesh.errors import ParseError
from mixmesh.lang.ir import (
    PARTIAL,
    REPLICATE,
    Shard,
    dual,
    make_ratio,
    parse_program,
    print_program,
    redistribution,
    shard_offsets,
    shard_sizes,
    support,
)

shares = st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda s: sum(s) > 0.01)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_text_reads_back_equal(program):
    text = str(program)
    assert parse_program(text) == program
    assert str(parse_program(text)) == text


def test_numbers_that_are_none_read_back_equal():
    program = parse_program(
        MLP.replace("return", "%nothing = aten.add.Tensor(%loss, nan) : f32[] P(sum)\n  return")
    )
    assert parse_program(str(program)) == program == parse_program(str(parse_program(str(program))))


def test_comments_carry_no_meaning():
    program = parse_program(MLP)
    notes = {n: f"{n} ms # again {{" for n in range(len(program.instructions))}
    assert parse_program(print_program(program, notes)) == program
    assert str(program) == MLP


def test_the_users_lines_are_read_from_comments():
    program = parse_program(MLP)
    at = [
        replace(i, location="" if i.is_leaf else f"a model.py:{n}")
        for n, i in enumerate(program.instructions)
    ]
    program = replace(program, instructions=tuple(at))
    read = parse_program(print_program(program, {n: "1.2 ms # {" for n in range(len(at))}))
    # the end of a path with spaces, as nothing says where it begins
    assert [i.location for i in read.instructions] == [i.location.removeprefix("a ") for i in at]
    assert all(not i.location for i in parse_program(MLP).instructions)


def test_lines_are_remembered():
    assert [i.line for i in parse_program(MLP).instructions] == [4, 5, 6, 7, 8, 9, 10]


WRONG = {
    "used before": ("%w)", "%v)", 6, "%v", "%v is used before it is defined"),
    "twice": ("%h =", "%x =", 6, "%x", "%x is defined twice"),
    "ratio": ("S(1)@r0", "S(1)@r7", 9, "r7", "unknown ratio 'r7'"),
    "no ratio": ("S(1)@r0", "S(1)", 9, "S(1)", "a sharded type needs a ratio"),
    "dim": ("S(1)@r0", "S(2)@r0", 9, "S(2)", "f32[20, 6] has no dim 2"),
    "unit": ("S(1)@r0", "S(1, 4)@r0", 9, "S(1, 4)", "dim 1 of f32[20, 6] cannot be cut in units of 4"),
    "dtype": ("f32[6, 8]", "f33[6, 8]", 5, "f33", "unknown dtype 'f33'"),
    "placement": ("f32[6, 8] R", "f32[6, 8] Q", 5, "Q", "unknown placement 'Q'"),
    "two axes": ("f32[6, 8] R", "f32[6, 8] (R, R)", 5, "(R, R)", "unexpected '('"),
    "shares": ("[0.5, 0.3, 0.2]", "[0.5, 0.5]", 2, "0.5, 0.5", "2 shares for 3 ranks"),
    "sum": ("[0.5, 0.3, 0.2]", "[0.5, 0.5, 0.2]", 2, "0.5, 0.5", "shares that sum to 1.2"),
    "sign": ("[0.5, 0.3, 0.2]", "[1.2, -0.4, 0.2]", 2, "1.2", "a share of 1.2"),
    "character": ("aten.relu(", "aten.relu?(", 8, "?", "unexpected '?'"),
    "bracket": ("aten.relu(%h.r)", "aten.relu(%h.r", 8, ": f32[20, 6] R", "unexpected ':'"),
    "world": ("world=3", "world=x", 1, "x {", "unexpected 'x'"),
    "results": ("%g = aten", "%g, %k = aten", 8, "%g", "2 results but 1 types"),
    "loss": ("return %loss", "return %lost", 11, "%lost", "%lost is used before it is defined"),
    "end": ("}\n", "", 12, "", "unexpected 'end of text'"),
    "after": ("}\n", "}\nmore\n", 13, "more", "unexpected 'more'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parse_errors_point_at_the_place(case):
    old, new, line, at, message = WRONG[case]
    text = MLP.replace(old, new, 1) if case not in ("end", "after") else MLP.removesuffix("}\n") + new
    with pytest.raises(ParseError) as caught:
        parse_program(text, "x.plan")
    error = caught.value
    where, column, rest = error.message.split(":", 2)[0], error.message.split(":")[2], error.message
    assert where == "x.plan" and rest.split(":")[1] == str(line)
    assert message in error.message
    source, caret = error.where.split("\n")
    assert source == (text.split("\n") + [""])[line - 1]
    assert caret.index("^") - 11 == int(column) - 1
    assert case == "results" or source[int(column) - 1 :].startswith(at)


def test_long_lines_are_shown_around_the_place():
    text = MLP.replace("f32[6, 8] R", "f32[6, " + "[" * 40_000 + "8] R")
    with pytest.raises(ParseError) as caught:
        parse_program(text)
    source, caret = caught.value.where.split("\n")
    assert len(source) <= 200 and source[caret.index("^") - 11] == "["


@given(st.integers(0, 200), shares, st.integers(1, 4))
def test_shard_sizes(num_units, raw, unit):
    ratio = make_ratio(raw)
    sizes = shard_sizes(num_units * unit, ratio, unit)
    assert sum(sizes) == num_units * unit
    assert all(s >= 0 and s % unit == 0 for s in sizes)
    assert all(sizes[j] == 0 for j in range(len(ratio)) if ratio[j] == 0)
    # largest remainder: nobody is a whole unit away from the exact share
    assert all(abs(s / unit - num_units * r) < 1 + 1e-3 * len(ratio) for s, r in zip(sizes, ratio))
    offsets = shard_offsets(sizes)
    assert offsets[0] == 0 and all(a + s == b for a, s, b in zip(offsets, sizes, offsets[1:]))


@given(shares, st.integers(1, 60))
def test_more_elements_never_shrink_a_shard_by_much(raw, count):
    ratio = make_ratio(raw)
    small, large = shard_sizes(count, ratio), shard_sizes(2 * count, ratio)
    assert all(abs(b - 2 * a) <= 2 for a, b in zip(small, large))


def test_shard_sizes_forgive_the_rounding_of_a_ratio():
    third = make_ratio([1, 1, 1])
    assert shard_sizes(9, third) == (3, 3, 3)
    assert shard_sizes(10, third) == (4, 3, 3)
    assert shard_sizes(0, third) == (0, 0, 0)
    with pytest.raises(ValueError, match="units of 4"):
        shard_sizes(10, third, 4)


@given(shares)
def test_ratios(raw):
    ratio = make_ratio(raw)
    assert math.isclose(sum(ratio), 1, abs_tol=1e-9)
    assert make_ratio(ratio) == ratio
    assert set(support(ratio)) <= {j for j, s in enumerate(raw) if s > 0}
    assert tuple(float(f"{s:g}") for s in ratio) == ratio  # as it is printed


@pytest.mark.parametrize("wrong", [[], [0, 0], [1, -1], [float("nan"), 1], [float("inf")]])
def test_no_ratio(wrong):
    with pytest.raises(ValueError, match="finite shares"):
        make_ratio(wrong)


PLACEMENTS = (REPLICATE, PARTIAL, Shard(0), Shard(1, 4))


@pytest.mark.parametrize("src", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dst", PLACEMENTS, ids=str)
def test_the_gradient_of_a_redistribution_is_one(src, dst):
    if src == dst:
        return
    assert dual(dual(src)) == src
    assert redistribution(src, dst) and redistribution(dual(dst), dual(src))


def test_gathering_a_weight_scatters_its_gradient():
    assert redistribution(Shard(0), REPLICATE) == "all_gather"
    assert redistribution(dual(REPLICATE), dual(Shard(0))) == "reduce_scatter"
