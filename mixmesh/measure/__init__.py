"""Measurements and trials on devices: profiles, the testbed, trials of plans, verification, the doctor."""
