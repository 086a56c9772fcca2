"""Small things that know nothing of training: files, units, solvers, logs."""
