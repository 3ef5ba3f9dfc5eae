"""What always holds of `Replicas` between two calls. For tests, because it examines everything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dart.core.fleet.health import Condition
from dart.core.fleet.replica import S

if TYPE_CHECKING:
    from dart.core.fleet.replicas import Replicas


def validate(replicas: Replicas[S]) -> None:
    """Raises AssertionError."""
    for name, replica in replicas._replicas.items():
        health, room = replica.health, replica.has_room
        healthy = health.condition is Condition.HEALTHY
        probed = health.condition is Condition.PROBING and room and not replica.probes
        assert name == replica.name and not replica.gone
        assert 0 <= replica.probes <= replica.busy
        assert replica.target is None or replica.version < replica.target <= replicas.newest
        assert replica.capacity == (replica.slots if healthy and replica.serving else 0)
        assert replica.rank == (-replica.version, name, replica.number)
        assert (name in replicas._to_probe) == probed
        assert replica.booked is replica.doing and replicas.usage.counts(name) == {replica.booked: 1}
        assert healthy or health.failures, "only failures end health"
        assert health.condition is not Condition.QUARANTINED or health.until < math.inf, "every rest ends"
    assert replicas.version <= replicas.newest < replicas.version + replicas._every_updates
    begun = [bool(one.health.breaks) for one in replicas if one.target is not None and not one.resting]
    assert replicas.together or all(begun.count(broke) <= replicas._max_unavailable for broke in (False, True))
    assert not any(one.resting and one.target is None for one in replicas)
    assert not replicas._line.keys() & replicas._retry_line.keys()
    assert not any(request.failed_on for request in replicas._line)
    replicas._offers.validate(replicas)
