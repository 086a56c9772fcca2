"""Mechanisms turned off one by one, each with the tests that must then fail: ``python -m tests.mutations``.

A mutation is a line of Python that is added to the end of a module, in a copy of the package: it gives
another value to a name of that module. Mutations that no test notices are printed as SURVIVED, and the exit
status is 1. ``python -m tests.mutations sfb order`` takes those whose name has one of the words. Not a part
of ``make test``, which only looks whether the names still exist (``test_mechanisms.py``).
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600.0
NO_TESTS = 5  # pytest's exit status where nothing was collected


@dataclass(frozen=True)
class Mutation:
    """``line`` is added to ``module`` (a path below ``mixmesh``). ``tests`` are pytest's arguments."""

    module: str
    line: str
    tests: str

    @property
    def name(self) -> str:
        """The name of the module that is another one afterwards, or has another attribute or item."""
        target = ast.parse(self.line).body[0].targets[0]
        while not isinstance(target, ast.Name):
            target = target.elts[0] if isinstance(target, ast.Tuple) else target.value
        return target.id


SAME = "lambda _, proposal, *__: proposal"
MECHANISMS = "tests/test_mechanisms.py -k"
PARTS = "tests/test_subsets.py -k not_slower"


def without(planner: str) -> str:
    """The list of planners without one."""
    return f"ROWS = tuple(row for row in ROWS if row.name != {planner!r})"


def without_sets(planner: str) -> str:
    """The list of planners, one of which is not asked for sets of machines."""
    not_asked = "__import__('dataclasses').replace(row, on_sets=None)"
    return f"ROWS = tuple({not_asked} if row.name == {planner!r} else row for row in ROWS)"


MUTATIONS = {
    # programs
    "sfb": Mutation("planner/passes/factors.py", "best_factors = lambda *_: None", f"{MECHANISMS} factors"),
    "shares by linear programming": Mutation(
        "planner/task.py",
        "optimal_ratio = lambda program, *_, **__: program.ratio_of['r0']",
        f"{MECHANISMS} 'linear'",
    ),
    "polishing": Mutation("planner/passes/shares.py", f"polish = {SAME}", f"{MECHANISMS} samples"),
    "recomputation": Mutation(
        "passes/recomputation.py",
        "recomputed = lambda program: program",
        "tests/test_recompute.py -k fits_only_so",
    ),
    "no more recomputation than needed": Mutation(
        "planner/passes/rematerialisation.py", f"fewest = {SAME}", "tests/test_recompute.py -k no_more_than"
    ),
    "sequence parallelism": Mutation(
        "planner/passes/sequence.py",
        "sequence_parallel = lambda program: program",
        "tests/test_sequence.py -k plan",
    ),
    "blocking sends": Mutation(
        "simulator/pipeline.py", "BLOCKING_SENDS = ''", "tests/test_pipeline_planner.py -k by_hand"
    ),
    "borders for blocking sends": Mutation(
        "planner/pipelines.py", "BLOCKING_SENDS = ''", "tests/test_pipeline_planner.py -k borders_are_chosen"
    ),
    "cut queries": Mutation(
        "lang/rules/products.py",
        "attention, _cut = (lambda call: _cut(call).replace(' s ', ' s! ')), attention",
        "tests/test_cut_sequences.py",
    ),
    "causal masks of cut queries": Mutation(
        "runtime/kernels.py",
        "del KERNELS['aten.scaled_dot_product_attention']",
        "tests/test_cut_sequences.py",
    ),
    "mixtures as operators": Mutation(
        "frontend/trace/mixtures.py", "mixtures_as_operators = lambda graph: graph", "tests/test_mixtures.py"
    ),
    # sums
    "sums by levels": Mutation("planner/task.py", "best_levels = lambda *_: None", f"{MECHANISMS} within"),
    "shard owners": Mutation(
        "planner/passes/reductions.py", "best_run = lambda program, *_: program", f"{MECHANISMS} owners"
    ),
    "buckets": Mutation("planner/task.py", "SMALLER_BYTES = LARGER_BYTES = ()", f"{MECHANISMS} buckets"),
    "margin of owners": Mutation("planner/passes/reductions.py", "MARGIN = 0.0", f"{MECHANISMS} hundredth"),
    "margin of owners too wide": Mutation(
        "planner/passes/reductions.py", "MARGIN = 0.3", f"{MECHANISMS} owners"
    ),
    "weight gradients first": Mutation(
        "planner/passes/weight_gradients.py", f"apart = {SAME}", f"{MECHANISMS} apart"
    ),
    "order": Mutation("planner/passes/order.py", f"ordered = {SAME}", f"{MECHANISMS} order"),
    "order: the list scheduler": Mutation(
        "planner/passes/order.py", "reordered = lambda *_: ()", f"{MECHANISMS} order"
    ),
    "zero: everything gathered again": Mutation(
        "passes/zero/stages.py",
        "_needed_again = lambda _, names: set(names)",
        "tests/test_zero_runtime.py -k gathered_once",
    ),
    "zero: nothing gathered again": Mutation(
        "passes/zero/stages.py",
        "_needed_again = lambda *_: set()",
        "tests/test_zero_runtime.py -k gathered_once",
    ),
    # placements
    "ps or all-reduce": Mutation(
        "search/placement/strategy.py", "SYNCS = SYNCS[:1]", "tests/test_placement.py tests/test_policies.py"
    ),
    "TAG's weights": Mutation(
        "search/learned/tag.py",
        "load = lambda *_: (torch.manual_seed(0), Policy().eval())[1]",
        "tests/test_tag_weights.py",
    ),
    "HeteroG's graph network": Mutation(
        "search/learned/heterog.py",
        "Policy.forward = lambda self, x, *_: self.leave(torch.tanh(self.enter(x)))",
        "tests/test_policies.py -k groups_give_each_other",
    ),
    "HeteroG's training": Mutation(
        "search/learned/heterog.py", "LEARNING_RATE = 0.0", "tests/test_policies.py -k moves_probability"
    ),
    # which devices
    "sets of devices": Mutation(
        "planner/hap.py", "device_sets = lambda task: [task.ranks]", f"{MECHANISMS} devices"
    ),
    "order of sets": Mutation(
        "planner/hap.py",
        "Synthesis.sets = lambda self: sorted(device_sets(self.task), key=lambda r: (-len(r), r))",
        f"{MECHANISMS} hopeful",
    ),
    "budget of sets": Mutation(
        "planner/hap.py", "Synthesis.most_sets = lambda *_: 1", f"{MECHANISMS} budget"
    ),
    "what is left to gain on some devices": Mutation(
        "planner/hap.py", "ALMOST = LOST", "tests/test_planning.py -k little"
    ),
    "half of the least sum of a step": Mutation(
        "planner/hap.py", "Synthesis.is_beaten = lambda *_: False", "tests/test_planning.py -k half"
    ),
    "sets in place of those that are too small": Mutation(
        "planner/hap.py", "MORE_SETS = 0", "tests/test_mechanisms.py -k too_small"
    ),
    "two levels on sets": Mutation("planner/propose.py", without_sets("two-level"), f"{MECHANISMS} levels"),
    "pipelines on sets": Mutation("planner/propose.py", without_sets("pipeline"), f"{MECHANISMS} pipelines"),
    "two levels": Mutation("planner/propose.py", without("two-level"), PARTS),
    "pipelines": Mutation("planner/propose.py", without("pipeline"), f"{MECHANISMS} pipelines"),
    # at the end
    "several are finished": Mutation("planner/finished.py", "FEW = 1", f"{MECHANISMS} finished"),
    "finished in time": Mutation("planner/finished.py", "SHARE = 0.0", f"{MECHANISMS} finished"),
    "warning of whole batches": Mutation(
        "planner/make.py", "whole_batch_warnings = lambda *_: iter(())", "tests/test_mixtures.py -k warn"
    ),
    "joined gradients are copied": Mutation(
        "cost/model.py", "CostModel.join_s = lambda *_: 0.0", "tests/test_profile_links.py -k joining"
    ),
    "calls after computing": Mutation(
        "cost/model.py", "CostModel.cold = lambda *_: ALWAYS_WARM", "tests/test_profile_links.py -k computing"
    ),
    "computing after a wait": Mutation(
        "simulator/run.py", "Run.wake = lambda *_: None", "tests/test_profile_links.py -k wait"
    ),
    "nodes of redistributions": Mutation(
        "cost/model.py",
        "CostModel.redistribution_s = lambda *_: 0.0",
        "tests/test_profile_links.py -k redistributions",
    ),
    "results in new pages": Mutation(
        "cost/model.py", "CostModel.new_pages_s = lambda *_: 0.0", "tests/test_profile_links.py -k pages"
    ),
    "products cut in other ways": Mutation(
        "cost/model.py", "CostModel._longer_if_cut = lambda *_: (1.0, 1.0)", "tests/test_lent.py -k cut"
    ),
    "cuts have the usual shape": Mutation(
        "cost/curve.py", "Curve.shaped = lambda self, _: self", "tests/test_profile_operators.py -k shape"
    ),
    "even pieces": Mutation(
        "cost/exchanges.py", "is_cut_evenly = lambda *_: False", "tests/test_profile_links.py -k even_pieces"
    ),
    "lent shapes": Mutation(
        "cost/lending.py", "with_shape = lambda op, _: op", "tests/test_lent.py -k shape"
    ),
    "a store that answers late is used again": Mutation(
        "runtime/peers.py",
        "Peers.note_silence = lambda self, is_silent: setattr(self, 'store_is_lost', is_silent)",
        "tests/test_silent_store.py",
    ),
    "ranks are known after the first comparison": Mutation(
        "runtime/watch.py", "Watch.meet_peers = lambda self: None", "tests/test_silent_store.py -k comparison"
    ),
    "a CPU's noise is left out": Mutation(
        "cost/profile.py", "DeviceProfile.calmed = property(lambda self: self)", "tests/test_calmed.py -k cpu"
    ),
    "a heap keeps everything where a device has room": Mutation(
        "runtime/allocator.py",
        "HeapLimit.keeps_everything = lambda self: False",
        "tests/test_allocator.py -k spare",
    ),
    "a heap keeps what the plan has room for": Mutation(
        "runtime/allocator.py", "HeapLimit.room_bytes = 0", "tests/test_allocator.py -k room"
    ),
    "state in an attribute that is empty at first": Mutation(
        "frontend/trace/carried.py", "Empty.check = lambda *_: None", "tests/test_trace_state.py -k refused"
    ),
    "state in dicts and lists": Mutation(
        "frontend/trace/reads.py", "_Pass.changed = lambda *_: ()", "tests/test_trace_state.py -k entry"
    ),
    "a size out of line is measured again": Mutation(
        "measure/profiler/links.py",
        "_Progress.is_out_of_line = lambda *_: False",
        "tests/test_profile_links.py -k slowed",
    ),
    "small messages do not tell": Mutation(
        "cost/links.py", "TELLING_BYTES = 0", "tests/test_profile_links.py -k unequal_pieces"
    ),
    "steps on a warm heap": Mutation(
        "measure/profiler/steps.py", "SCARCE = 0.0", "tests/test_profile_memory.py -k scarce"
    ),
    "operators on the heap of a step": Mutation(
        "measure/profiler/__init__.py",
        "left_in_heap_bytes = lambda *_: 0",
        "tests/test_profile_memory.py -k heap_of_a_step",
    ),
    "an operator at the shares of other devices": Mutation(
        "cost/lending.py", "with_others = lambda op, others: op", "tests/test_lent.py -k others_at_theirs"
    ),
    "profiles keep everything where trainings do": Mutation(
        "runtime/allocator.py",
        "HeapLimit.keeps_everything = lambda self: False",
        "tests/test_profile_memory.py -k heap_of_a_step",
    ),
    "the median of windows": Mutation(
        "measure/profiler/steps.py",
        "statistics.median = statistics.mean",
        "tests/test_profile_memory.py -k slowed",
    ),
    "lent operators": Mutation("cost/model.py", "CostModel._pace = lambda *_: None", "tests/test_lent.py"),
    "ranks agree on a batch": Mutation(
        "simulator/simulation.py",
        "Simulation._own_work_s = lambda _, program: [0.0] * program.world_size",
        "tests/test_profile_links.py -k agree",
    ),
    "operators are called directly": Mutation(
        "runtime/executor.py", "DirectCall = ()", "tests/test_operator_calls.py -k source"
    ),
    "PyTorch's own bindings": Mutation(
        "runtime/direct.py", "BINDINGS = {}", "tests/test_operator_calls.py -k binding"
    ),
    "the runtime's own work": Mutation(
        "cost/model.py", "CostModel.overhead_s = lambda *_: 0.0", "tests/test_profile_links.py -k own_work"
    ),
    "the gradient of what a block without gradients reads": Mutation(
        "frontend/trace/regions.py", "itself = lambda _: None", "tests/test_trace.py -k block_without"
    ),
    "no node for a rank alone": Mutation(
        "runtime/parallel.py", "runs_alone = lambda *_: False", "tests/idioms/test_alone.py"
    ),
    "checksums before norms": Mutation(
        "runtime/drift.py", "is_same = lambda _: False", "tests/idioms/test_drift.py -k checksums"
    ),
    "one gradient of batch norm's data on a CPU": Mutation(
        "lang/operators/norms.py", "_Link.on = lambda x: None", "tests/test_batch_norm.py -k computes_one"
    ),
    "sums beside computing are measured in any case": Mutation(
        "measure/profiler/overlap.py",
        "measure_overlap = lambda *_: Overlap()",
        "tests/test_profile_links.py -k without_time",
    ),
    "questions about gradients": Mutation(
        "runtime/shapes/forms.py",
        "Forms.check_questions = lambda *_: None",
        "tests/idioms/test_loss_outside.py -k question",
    ),
    "offers are checked": Mutation(
        "planner/offered.py", "check_program = lambda *_: None", "tests/corpus/test_offered.py"
    ),
}


def survives(mutation: Mutation) -> bool:
    """Whether the tests pass with the mechanism turned off."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "mixmesh", copy / "mixmesh", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "examples", "pyproject.toml"):
            (copy / name).symlink_to(ROOT / name)
        path = copy / "mixmesh" / mutation.module
        path.write_text(f"{path.read_text()}\n\n{mutation.line}\n")
        done = subprocess.run(
            f"{sys.executable} -m pytest -q -x -p no:cacheprovider --rootdir {copy} {mutation.tests}",
            shell=True, cwd=copy, env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    return done.returncode in (0, NO_TESTS)


def main(words: list[str]) -> int:
    chosen = {n: m for n, m in MUTATIONS.items() if not words or any(w.lower() in n.lower() for w in words)}
    survivors = 0
    for name, mutation in chosen.items():
        started = time.monotonic()
        survived = survives(mutation)
        survivors += survived
        state = "SURVIVED" if survived else "noticed"
        print(f"{state:9} {name}  {time.monotonic() - started:.0f} s  ({mutation.tests})", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
