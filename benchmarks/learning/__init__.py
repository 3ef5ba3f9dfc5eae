"""Does it learn, and how much does each piece of the algorithm matter? Real training runs, which take hours.

`protocols/` holds the experiments as files that are committed before their runs; `benchmarks.trials` runs them.
"""
