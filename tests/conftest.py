"""Options of the test suite."""

import os

# the tensors of tests are small: threads cost more than they give, many times more on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is now")


# the files that take longest, which begin first: at the end one core would wait for them
LONGEST = """
test_elastic test_subsets test_watch test_gloo test_timeline test_planner test_memory test_tuning
test_direct test_pipeline test_detection test_prepare test_hf_trainer test_scripts test_mixtures
test_zero_runtime test_files test_fuzz test_verify_models test_any_batch test_data_that_fails test_shapes
test_auto test_resuming test_bench_faults test_plans test_other_devices test_run_checkpoints
test_own_loop
""".split()


def pytest_collection_modifyitems(items):
    order = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
