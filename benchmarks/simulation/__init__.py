"""The real coordinator on a virtual clock: environments, replicas and the trainer are timing models (`timings`)."""
