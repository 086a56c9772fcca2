"""Options of the test suite."""


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is now")
