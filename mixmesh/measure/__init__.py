"""What is measured or tried on devices: profiles, the testbed, trials of plans, verification, the doctor."""
