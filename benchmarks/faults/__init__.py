"""Trainings that are disturbed on purpose, each compared with an undisturbed one.

Reading order: ``bench`` (the entry), ``scene`` (one training under torchrun), ``kinds`` (the faults),
``judgement`` (what must hold afterwards); ``journal`` is what ranks write, ``job`` and ``worker`` run inside.
"""
