"""The workers: the server that they connect to, their sessions, and environments and replicas as resources."""
