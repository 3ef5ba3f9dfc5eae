"""What `benchmarks.weight_sync` is made of: processes that hold tensors, replicas that sleep, and the code that watches them."""
