"""Does it learn, and how much does each piece of the algorithm matter? Measured on real tasks; takes hours."""
