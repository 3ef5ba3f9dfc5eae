"""Does it learn, and how much does each piece of the algorithm matter? On real tasks; takes hours."""
