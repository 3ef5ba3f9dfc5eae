"""What is done with batches: the trainer as one, its updates, and the weights that they make."""
