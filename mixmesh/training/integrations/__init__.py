"""Integrations with the trainers of other libraries, one package each. None is imported by ``import
mixmesh``."""
