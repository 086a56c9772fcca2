"""Files from anywhere: what is read is checked where it is read; operators come from one list."""

from __future__ import annotations

import json
import time

import pytest
import torch
from fuzz import checkpoints, files, seeds
from torch import nn

from mixmesh.cost import Profile
from mixmesh.errors import InputError, MixmeshError, ParseError, PlanError, TraceError, UnsupportedOp
from mixmesh.frontend.trace import overload, trace
from mixmesh.lang.check import check_loaded, check_placements, check_program
from mixmesh.lang.ir import parse_program
from mixmesh.lang.plan_file import Plan
from mixmesh.measure.testbed import journal
from mixmesh.measure.verification import verify
from mixmesh.runtime.parallel import parallelize


@pytest.fixture(scope="module", autouse=True)
def no_pretended_world_is_left():
    """Checkpoints are made in one, which tests that follow in this process must not find."""
    yield
    checkpoints.made.cache_clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


SMALL = """\
program p world=2 {
  ratio r0 = [0.5, 0.5]
  %x = input("x") : f32[8, 4] S(0)@r0
  %y = aten.relu(%x) : f32[8, 4] S(0)@r0
  %l = aten.sum(%y) : f32[] P(sum)
  return %l
}
"""
FUZZ_S = 25.0


@pytest.mark.parametrize(
    "name",
    [
        "import_module.__func__.__call__", "load_library.x", "_dir.x", "aten.from_file", "aten.add_.Tensor",
        "aten.set_.source_Storage", "aten.add.op", "aten.__class__", "profiler._record_function_enter",
        "c10d.send", "prim.x", "aten", "aten.", "aten.relu.default.x", "quantized.add", "os.system",
    ],
)  # fmt: skip
def test_operators_are_looked_up_and_never_walked_to(name):
    with pytest.raises(UnsupportedOp):
        overload(name)
    program = SMALL.replace("aten.relu", name)
    with pytest.raises(MixmeshError):
        check_program(parse_program(program))


BOUNDS = {
    "ranks": ("world=2", "world=1000000000", "1 to 65536 ranks"),
    "elements": ("f32[8, 4] S(0)@r0\n  %y", "f32[8, 1000000000000000000] S(0)@r0\n  %y", "elements"),
    "dims": ("f32[8, 4] S(0)@r0\n  %y", f"f32[8{', 1' * 64}] S(0)@r0\n  %y", "at most 64"),
    "digits": ("%x)", f"%x, {'9' * 5000})", "at most 9223372036854775807"),
    "depth": ("%x)", f"%x, {'[' * 900}1{']' * 900})", "at most 8 deep"),
    "escape": ('"x"', r'"\q"', "a string as JSON writes it"),
    "surrogate": ('"x"', r'"\ud800"', "a string as JSON writes it"),
    "argument twice": ("%x)", "%x, a=1, a=2)", "every argument once"),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_what_a_program_asks_for_is_bounded(case):
    old, new, expected = BOUNDS[case]
    with pytest.raises(ParseError) as caught:
        parse_program(SMALL.replace(old, new, 1), "x.plan")
    assert expected in caught.value.expected and "x.plan:" in caught.value.message


def test_instructions_are_bounded():
    line = "  %y = aten.relu(%x) : f32[8, 4] S(0)@r0\n"
    many = "".join(line.replace("%y", f"%y{n}") for n in range(100_001))
    with pytest.raises(ParseError, match="too many instructions"):
        parse_program(SMALL.replace(line, line + many))


@pytest.mark.parametrize(
    "attribute, expected",
    [("bucket=-1", "whole number"), ("sfb=1", "true or false"), ("drawn=[1]", "number of the operator"),
     ("algorithm=3", "a string"), ("bukket=0", "bucket"), ("reshard=true, reshard=true", "once")],
)  # fmt: skip
def test_attributes_are_checked(attribute, expected):
    text = SMALL.replace("aten.relu(%x)", f"aten.relu(%x) {{{attribute}}}")
    with pytest.raises(MixmeshError) as caught:
        check_placements(parse_program(text), "x.plan")
    assert expected in caught.value.expected and caught.value.where.startswith("x.plan:4: ")


DRAWN = "aten.native_dropout(%x, 0.5, true) {{drawn={}}} : f32[8, 4] S(0)@r0, bool[8, 4] S(0)@r0"


@pytest.mark.parametrize(
    "drawn, is_part",
    [("[0, 0, 8, 16, 4]", True), ("[0, 0, 9, 16, 4]", False), ("[0, 2, 0, 8, 4]", False),
     ("[0, 0, 0, 8]", False), ("[0, 0, 0, 8, 5]", False), ("[1, 9, 9]", False)],
)  # fmt: skip
def test_what_is_drawn_is_a_part_of_the_whole(drawn, is_part):
    text = SMALL.replace("%y = aten.relu(%x) : f32[8, 4] S(0)@r0", f"%y, _ = {DRAWN.format(drawn)}")
    if is_part:
        return check_placements(parse_program(text), "x.plan")
    with pytest.raises(MixmeshError, match="drawn cannot be this"):
        check_placements(parse_program(text), "x.plan")


def test_only_what_draws_may_be_a_part():
    text = SMALL.replace("aten.relu(%x)", "aten.relu(%x) {drawn=[0, 0, 0, 8, 4]}")
    with pytest.raises(MixmeshError, match="drawn cannot be this"):
        check_placements(parse_program(text), "x.plan")


HEADERS = {
    "steps": ("micro_batches", "[[1, 1000000000, 1], [4, 1, 4], [0, 0, 0], [0, 0, 0]]"),
    "ranks": ("predicted_peak_memory_bytes", "[1, 2]"),
    "text": ("planner", "3"),
    "seconds": ("predicted_step_s", "nan"),
    "digits": ("states_expanded", "9" * 30),
    "flag": ("feasible", '"yes"'),
    "list": ("warnings", "[1]"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_the_header_names_its_line(case):
    key, value = HEADERS[case]
    lines = [line for line in seeds.plans()[0][1].split("\n") if not line.startswith(f"{key} =")]
    lines.insert(3, f"{key} = {value}")
    with pytest.raises(PlanError) as caught:
        Plan.parse("\n".join(lines), "x.plan")
    assert caught.value.where == "x.plan:4" and f"{key} = " in caught.value.expected


MIXED = "<<<<<<< HEAD\n{0}\n=======\n{0}\n>>>>>>> other"
DAMAGES = {
    "merged header": ("planner =", MIXED.format("planner ="), "nobody has chosen", ":"),
    "merged program": ("  ratio", MIXED.format("  ratio"), "nobody has chosen", ":"),
    "mistyped": ("cluster_name", "clustr_name", "unknown key in the plan's header: 'clustr_name'", ":5"),
    "twice": ("cluster_name", "planner", "Cannot overwrite a value", ":5"),
    "no version": ("mixmesh_plan = 1\n", "", "another format", "x.plan"),
    "version": ("mixmesh_plan = 1\n", "mixmesh_plan = 2\n", "another format", ":1"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_header_is_refused_with_its_line(case):
    old, new, message, line = DAMAGES[case]
    text = seeds.plans()[0][1]
    assert old in text
    with pytest.raises(PlanError, match=message) as caught:
        Plan.parse(text.replace(old, new, 1), "x.plan")
    error = caught.value
    assert line in error.where and error.expected and error.got and error.hint


def test_a_plan_from_an_editor_of_windows(tmp_path):
    text = seeds.plans()[0][1]
    (tmp_path / "x.plan").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert Plan.load(tmp_path / "x.plan") == Plan.parse(text)


def test_an_edited_program_is_checked_against_pytorch():
    text = seeds.plans()[0][1]
    assert not Plan.parse(text).edited
    with pytest.raises(MixmeshError, match="take these arguments"):
        check_loaded(Plan.parse(text.replace("aten.gelu(%linear", "aten.gelu(%linear, 3", 1)))
    edited = Plan.parse(text.replace("aten.gelu", "aten.relu", 1))
    assert edited.edited and Plan.parse(str(edited)).edited


def test_a_merged_profile_names_its_line(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(MIXED.format(seeds.profile()))
    with pytest.raises(InputError, match="nobody has chosen") as caught:
        Profile.load(path)
    assert caught.value.where == f"{path}:1" and caught.value.got == "<<<<<<< HEAD"


def test_a_profile_of_nonsense_is_refused(tmp_path):
    data = json.loads(seeds.profile())
    op = next(iter(next(iter(data["devices"].values()))["ops"].values()))
    for points in ([], [[0.5, 1.0], [0.5, 2.0]], [[2.0, 1.0]], [[0.5, 1e300]]):
        op["forward"] = points
        path = tmp_path / "p.json"
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match="this is not a profile"):
            Profile.load(path)
    text = seeds.profile().replace("aten.relu(f32[", f"aten.relu(f32[{'9' * 5000}, ")
    path.write_text(text)
    with pytest.raises(InputError, match="this is not a profile"):
        Profile.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InputError):
        Profile.load(path)


@pytest.mark.parametrize(
    "change",
    [{"pid": "1"}, {"pid": True}, {"namespaces": [3]}, {"cgroups": [None]}, {"bed": 7}, {"more": 1},
     {"start_time": 5}, {"namespaces": "mm01234567sw"}],
)  # fmt: skip
def test_a_journal_of_other_kinds_is_none(tmp_path, change):
    path = tmp_path / "mm01234567.json"
    path.write_text(seeds.JOURNAL)
    assert journal.load(path) is not None
    path.write_text(json.dumps(json.loads(seeds.JOURNAL) | change))
    assert journal.load(path) is None


class OnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x):
        return (self.linear(x) * self.places).sum()


def test_a_model_without_values_is_refused_with_what_to_write():
    with torch.device("meta"):
        model, batch = OnMeta(), {"x": torch.empty(8, 4)}
    with pytest.raises(TraceError, match="has no values") as caught:
        trace(model, batch)
    assert "register_buffer" in caught.value.hint[0]
    places = model.places
    del model.places
    model.register_buffer("places", places, persistent=False)
    assert trace(model, batch).graph.batch_inputs
    with pytest.raises(InputError, match="no values"):
        parallelize(model, None, parse_program(SMALL), device="cpu")


def test_mutated_files_load_or_are_refused():
    report = files.run_cases(7, time.monotonic() + FUZZ_S)
    assert report.num_cases > 20 and not report.failures, [f.what for f in report.failures]


@pytest.mark.parametrize("line", ['input("x")', "aten.relu(%x)", "aten.sum(%y)"])
def test_only_linear_layers_have_factors(line):
    with pytest.raises(MixmeshError, match="only the gradient of a linear layer"):
        check_program(parse_program(SMALL.replace(line, line + " {sfb=true}")), "x.plan")


def test_an_operator_without_tensors_is_refused():
    with pytest.raises(MixmeshError):
        check_program(parse_program(SMALL.replace("aten.relu(%x)", "aten.detach()")), "x.plan")


def test_what_kernels_alone_check_is_an_error_of_the_instruction():
    """A probability of infinity passes PyTorch's kernels for types."""
    name, text = seeds.plans()[0]
    plan = Plan.parse(text.replace("%gelu, 0.1, true", "%gelu, inf, true"), "x.plan")
    known = seeds.models()[name]
    with pytest.raises(MixmeshError, match="native_dropout"):
        verify(known.module, known.batch, plan, traced=known.traced, where="x.plan")
