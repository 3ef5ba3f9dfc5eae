"""The parts of `benchmarks.weight_sync`: processes that hold tensors, sleeping replicas, and their observers."""
