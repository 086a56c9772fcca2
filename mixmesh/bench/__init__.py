"""The project's own comparisons, each a function from cases to rows."""
