"""Processes on this machine: the workers that `dart train` starts, the GPUs they get, settings of a process itself."""
