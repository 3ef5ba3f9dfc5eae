"""What a fleet makes of a worker that dials again without its session, and of answers that nothing asked for."""

from __future__ import annotations

from dart.coordinator.fleet.boundary import LATE_ANSWERS
from dart.coordinator.fleet.sessions import Fleet
from dart.core.fleet.conduct import FIRST_SECONDS, STRIKES
from dart.v1 import session_pb2 as pb


def hello(last_epoch: int = 0) -> pb.Hello:
    return pb.Hello(worker_id="env-1", instance_id="env-1", role=pb.ROLE_ENV, last_epoch=last_epoch)


def test_an_instance_that_has_read_no_welcome_begins_a_new_session() -> None:
    """Its stream broke after the coordinator had admitted it: it does not know the epoch of the session."""
    fleet = Fleet(60.0)
    first, _ = fleet.admit(hello())
    first.tell(pb.Release(assignment=pb.Assignment(assignment_id="t", attempt=1)))
    second, resumed = fleet.admit(hello())
    assert not resumed and second is not first
    assert (first.state, first.why_lost) == ("lost", "it started a new session")
    assert second.epoch > first.epoch and not len(second.outbox), "a command of the old session means nothing to it"
    assert fleet.workers == {"env-1": second}
    assert fleet.admit(hello(second.epoch)) == (second, True)


def test_answers_that_nothing_asked_for_are_strikes_once_they_are_too_many() -> None:
    fleet = Fleet(60.0)
    worker, _ = fleet.admit(hello())
    fleet.became_ready(worker, pb.Ready(slots=1))
    assignment = pb.Assignment(assignment_id="t", attempt=1)
    worker.tell(pb.Release(assignment=assignment))
    answer = pb.SessionRequest(released=pb.Released(assignment=assignment))
    for _ in range(LATE_ANSWERS + 1):  # the command has at most one
        fleet.receive(worker, answer)
    assert fleet.boundary.told(worker.role_and_id) == "" and worker.state == "ready"
    for _ in range(STRIKES):
        assert worker.state == "ready"
        fleet.receive(worker, answer)
    assert worker.state == "lost"
    assert worker.why_lost.startswith(f"it is refused for {FIRST_SECONDS:.0f} s: Assignment is that of no open command")
