"""The project's own comparisons, each a function from cases to rows: ``python -m benchmarks NAME``.

They stand beside the package and are no part of what is installed.
"""
