"""From what a person wrote to a graph: jobs and the trace of their models."""
