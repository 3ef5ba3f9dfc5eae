"""What is done with batches: updates by the trainer's ranks, and syncing the weights that they make."""
