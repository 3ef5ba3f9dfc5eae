"""What people and other programs see of a run, and how they control it."""
