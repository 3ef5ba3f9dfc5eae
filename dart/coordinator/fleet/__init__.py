"""The workers: the server that they dial, their sessions, and environments and replicas as resources."""
