"""Options of the test suite."""

import os

# the tensors of tests are small: threads cost more than they give, many times more on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is now")
