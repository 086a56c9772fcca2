"""Trainings that are disturbed on purpose, beside one that is not.

Reading order: ``bench`` (the entry), ``scene`` (one training under torchrun), ``kinds`` (what is done to it),
``judgement`` (what must hold afterwards); ``journal`` is what ranks write, ``job`` and ``worker`` run inside.
"""
