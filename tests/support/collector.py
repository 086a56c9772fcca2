"""The garbage collector in tests, which would go through millions of objects of imported modules again."""

import gc


def collect_seldom() -> None:
    gc.set_threshold(100_000, 50, 100)
