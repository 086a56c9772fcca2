"""From the user's code to a graph: jobs, and the trace of their models."""
