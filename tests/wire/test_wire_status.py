"""`Status` and its message: every field has its like, and nothing is lost on the way."""

from __future__ import annotations

import json
import math

from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from dart.core.json_text import to_json
from dart.core.progress import Counts, StalenessCounts
from dart.core.status import Figures, Status, TimeSpent, Usage, WorkerStatus
from dart.core.types import plain_fields
from dart.v1 import control_pb2 as cpb
from dart.wire.status import status_from_proto, status_to_proto

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
number = st.integers(0, 2**31)
real = st.floats(allow_nan=False)
by_name = st.dictionaries(text, real, max_size=3)
workers = st.builds(
    WorkerStatus, text, st.sampled_from(["env", "rollout", "train"]), text, number, number, number, real, text
)
counts = st.builds(
    Counts,
    **dict.fromkeys(plain_fields(Counts), number),
    fates=st.dictionaries(text, number, max_size=3),
    staleness=st.builds(StalenessCounts, number, number, number),
    reading_rules=st.dictionaries(text, number, max_size=3),
)
figures = st.builds(Figures, counts, st.builds(Usage, *[real] * 6), st.none() | real, by_name, real)
spent = st.builds(TimeSpent, by_name, by_name, by_name)
statuses = st.builds(
    Status, text, text, figures, real, text, real, spent, spent, spent, st.lists(workers, max_size=3).map(tuple),
    st.dictionaries(text, text, max_size=3), text, paused=st.none() | st.booleans(),
)  # fmt: skip


@given(statuses)
def test_a_status_survives_its_message(status: Status) -> None:
    message = cpb.GetStatusResponse.FromString(status_to_proto(status).SerializeToString())
    assert status_from_proto(message) == status


def test_older_programs_find_the_figures_at_the_top() -> None:
    counts = Counts(updates=3, version=4, trajectories=50, env_steps=200, fates={"trained": 40})
    told = status_to_proto(Status("run", "training", Figures(counts, Usage(0.5, 0.25, 0.75, 12.0), 0.9)))
    assert (told.update, told.weight_version, told.trajectories, told.env_steps) == (3, 4, 50, 200)
    assert (told.env_utilisation, told.rollout_utilisation, told.trainer_utilisation) == (0.5, 0.25, 0.75)
    assert (told.trained_actions_per_minute, told.success_rate, dict(told.fates)) == (12.0, 0.9, {"trained": 40})


def test_a_newer_coordinator_may_know_a_role_that_this_program_does_not() -> None:
    message = cpb.GetStatusResponse(workers=[cpb.WorkerStatus(worker_id="judge-1", role=9)])
    assert status_from_proto(message).workers[0].role == "9"
    assert MessageToDict(message)["workers"][0]["role"] == 9


def test_figures_survive_an_update_event() -> None:
    usage = Usage(0.5, 0.25, 0.75, 12.0, 13.0, 1400.5)
    told = Figures(Counts(updates=3, staleness=StalenessCounts(2, 1, 8)), usage, 0.875, {"click": 0.5}, 61.25)
    assert Figures.from_json(json.loads(to_json(told.to_json()))) == told
    assert Figures.from_json({}) == Figures()


def test_a_run_that_samples_nothing_has_no_success_rate() -> None:
    imitation = Figures(Counts(updates=3))
    assert imitation.success_rate is None and status_to_proto(Status("run", "training", imitation)).success_rate == 0
    assert Figures.from_json(imitation.to_json()) == imitation
    older = imitation.to_json() | {"success_rate": 0.0}
    assert Figures.from_json(older).success_rate is None, "earlier versions of dart wrote 0"
    failed = Figures(Counts(updates=3, trajectories=8), success_rate=0.0)
    assert Figures.from_json(failed.to_json()).success_rate == 0.0


def test_a_rate_that_is_no_number_is_valid_json() -> None:
    assert json.loads(to_json(Figures(success_rate=math.nan).to_json()))["success_rate"] is None
