"""The parts that a user's own script calls: prepare, integrations, shares that follow devices."""
