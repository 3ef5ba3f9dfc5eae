"""What a peer may send: every message is checked here before anything counts, stores or routes it.

- `table`: the range, length, count and finiteness of every field of every message that a peer may send, in one table.
- `kinds`: the kinds of rule in the table, and `Violation`, which names the field, the value (shortened) and the rule.
- `fields`: applies the table to a message.
- `answers`: which answers a command may have, and what in them depends on the command or the run.
- `crowds`: counts fields in a message's bytes, before it is parsed.

Everything here is pure. What follows from a violation is decided in `dart.core.fleet.conduct`.
"""

from dart.wire.rules.answers import (
    ANSWERED_WITH,
    ANSWERS,
    UNASKED,
    Limits,
    generation_violation,
    hello,
    ready,
    violation,
    violation_of,
)
from dart.wire.rules.crowds import Malformed, parsed
from dart.wire.rules.fields import BODIES, REQUESTS
from dart.wire.rules.kinds import Violation, clean, shortened

__all__ = [
    "ANSWERED_WITH",
    "ANSWERS",
    "BODIES",
    "REQUESTS",
    "UNASKED",
    "Limits",
    "Malformed",
    "Violation",
    "clean",
    "generation_violation",
    "hello",
    "parsed",
    "ready",
    "shortened",
    "violation",
    "violation_of",
]
