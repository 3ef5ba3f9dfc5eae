"""Seeded faults in simulated runs: what they are, how each befalls a worker, and what must hold meanwhile."""
