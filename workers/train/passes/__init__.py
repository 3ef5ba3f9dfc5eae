"""How a rank works through its micro-batches: what is left out, what is halved, and in step with whom."""
