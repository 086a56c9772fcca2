"""Generators of hostile input: random models, random programs and whatever else finds what nobody thought of.

Each kind is one module with ``run_cases(seed,
until_time_s, progress) -> Report`` and ``replay(case_seed) -> Report``;
``python -m tests.fuzz`` runs them. The references are plain PyTorch and share no code with
``mixmesh.measure.verification``.
"""
