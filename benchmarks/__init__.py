"""The project's own comparisons, each a function from cases to rows: ``python -m benchmarks NAME``.

They are next to the package and not installed with it.
"""
