"""What only a machine with GPUs can show."""
