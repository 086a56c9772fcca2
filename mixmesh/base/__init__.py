"""Small helpers without knowledge of training: files, units, solvers, logs."""
