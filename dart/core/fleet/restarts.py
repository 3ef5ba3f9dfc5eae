"""How often a process that fails is started again, and after which pause.

`dart train`, which also resumes whole runs, and `dart launch ray` each decide for themselves what a failure is. The
script of `dart launch slurm` has pauses of its own.
"""

from __future__ import annotations

MOST_RESTARTS = 3
"""In a row, of one that keeps failing soon after its start."""
LASTING_SECONDS = 600.0
"""What has run for this long did not fail at its start: its failures are counted anew."""
LONGEST_PAUSE_SECONDS = 60.0


def pause_seconds(failures: int) -> float:
    """Before the start after so many failures in a row, at least one: 2 s, and twice as long after each further one.

    What the process needs, a server for example, may be away for a moment.
    """
    return min(2.0**failures, LONGEST_PAUSE_SECONDS)
