"""Options of the test suite."""

import os
import sys

import pytest
from support.collector import collect_seldom

# processes that tests start import mixmesh, which is compiled once for all of them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# the tensors of tests are small: threads cost more than they give, many times more on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
# many tests fork, which CUDA does not survive, and compare with a CPU's numbers: only `make gpu-check` sees
# a GPU
if "MIXMESH_TEST_GPU" not in os.environ:
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
# cards that were calibrated on this machine must not change what tests expect of the catalogue
os.environ["MIXMESH_DEVICES"] = "none"


collect_seldom()


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is now")


# the files that take longest, which begin first: at the end one core would wait for them
LONGEST = """
test_elastic test_subsets test_watch test_gloo test_timeline test_planner test_memory test_tuning
test_direct test_pipeline test_detection test_prepare test_hf_trainer test_scripts test_mixtures
test_zero_runtime test_files test_fuzz test_verify_models test_any_batch test_data_that_fails test_shapes
test_auto test_resuming test_bench_faults test_plans test_other_devices test_run_checkpoints
test_own_loop test_watch_phases test_doctor_thorough test_cluster_examples test_site test_compiled test_face
test_simulated_bytes test_evaluation test_commands test_bench_training test_cli
""".split()


def pytest_collection_modifyitems(items):
    order = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    """A model that one process trains makes a process group, which would be there for the next file too."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def browser():
    """A Chromium for all tests of a process that look at pages, which are skipped without one; an error where
    pictures are asked for."""
    from tools.browser import MISSING, chromium
    from tools.browser import browser as started

    if chromium() is None:
        if "REPORT_SHOTS" in os.environ:
            raise RuntimeError(MISSING)
        pytest.skip("needs Chromium")
    with started() as running:
        yield running
