"""Turns the user's code into a graph: jobs, and the trace of their models."""
