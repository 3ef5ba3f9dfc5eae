"""How far one coordinator goes: `python -m benchmarks.scale`.

At each size, environments that take as long as desktops for a step, in env workers of 64 each, and 256 replicas, all
connected to one coordinator, whose costs are measured.

Real: the coordinator with its server, sessions, pools, episodes, data manager, curation and SQLite; a gRPC connection
for each worker, run by the project's own worker loop in other processes; screenshots as files in the run's directory,
which the coordinator looks up when it stores a trajectory. Simulated: environments sleep and send random bytes as
screenshots, replicas sleep and answer with fixed tokens, a batch counts as trained at once.

Workers see the run's directory, so only digests of screenshots travel and their size does not matter to the
coordinator; `benchmarks.step_path` measures screenshots that go through it. Both ends share this machine's cores, so
`steps_per_second` below `asked` means that the machine, not the coordinator, was full; `cores` is what the
coordinator's process alone used, and `loop_cores` its event loop's thread, of which there is one.
"""
