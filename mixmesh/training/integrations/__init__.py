"""Trainers that other libraries have, one package each. None is imported by ``import mixmesh``."""
