"""What people and other programs see of a run, and the levers that they have."""
