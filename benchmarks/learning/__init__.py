"""Does it learn, and what does each piece of the algorithm matter? Real tasks, hours."""
