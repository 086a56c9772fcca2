"""The parts that a person's own script meets: prepare, integrations, shares that follow devices."""
