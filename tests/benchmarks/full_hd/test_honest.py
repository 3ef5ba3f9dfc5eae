"""Timings derived for full-HD screenshots, and that those without a name have stayed."""

from __future__ import annotations

import pytest

from benchmarks import efficiency
from benchmarks.gpu.models import ui_tars
from benchmarks.simulation.full_hd import derived, pages
from benchmarks.simulation.full_hd.prompts import ANSWER, SCREENSHOT, SLIDING, STRIDE_3, SYSTEM, TEMPLATE, History
from benchmarks.simulation.timings import Timings
from dart.core.capacity.work import PEAKS


def test_a_window_slides_by_one_or_in_blocks() -> None:
    assert [SLIDING.shown(step) for step in range(1, 9)] == [1, 2, 3, 4, 5, 5, 5, 5]
    assert [STRIDE_3.shown(step) for step in range(1, 13)] == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]


def test_what_is_cached_ends_at_the_first_screenshot_that_is_left_out() -> None:
    assert SLIDING.cached(1) == 0
    assert SLIDING.cached(5) == SLIDING.prompt(4) + ANSWER
    assert SLIDING.cached(6) == SYSTEM
    assert SLIDING.cached(8) == SYSTEM + 2 * (ANSWER + TEMPLATE)
    assert STRIDE_3.cached(7) == STRIDE_3.prompt(6) + ANSWER
    assert STRIDE_3.prompt(7) - STRIDE_3.cached(7) == SCREENSHOT + TEMPLATE


def test_rows_hold_every_step_once_and_end_where_a_screenshot_is_left_out() -> None:
    rows = list(STRIDE_3.rows(12))
    assert [steps for _, steps, _ in rows] == [5, 3, 3, 1]
    assert [screenshots for _, _, screenshots in rows] == [5, 5, 5, 3]
    assert [steps for _, steps, _ in SLIDING.rows(8)] == [5, 1, 1, 1]
    assert next(STRIDE_3.rows(12))[0] == SYSTEM + 5 * SCREENSHOT + 4 * (ANSWER + TEMPLATE) + ANSWER


def test_thirty_steps_of_full_hd() -> None:
    assert SLIDING.prompt_tokens(30) == pytest.approx(469e3, rel=0.01)
    assert SLIDING.cached_share(30) == pytest.approx(0.20, abs=0.02)
    assert STRIDE_3.cached_share(30) == pytest.approx(0.64, abs=0.02)
    assert SLIDING.training(30).tokens > 2.5 * STRIDE_3.training(30).tokens
    assert History(9, 5).training(30).screenshots < SLIDING.training(30).screenshots / 2


def test_seconds_of_a_step_follow_from_operations() -> None:
    assert derived.trainer_seconds(SLIDING) == pytest.approx(0.50, abs=0.03)
    assert derived.trainer_seconds(STRIDE_3) < derived.trainer_seconds(SLIDING) / 2
    assert derived.trainer_seconds(STRIDE_3, "language model") < derived.trainer_seconds(STRIDE_3)
    assert derived.prefill_seconds(STRIDE_3) < derived.prefill_seconds(SLIDING) / 2


def test_an_adapters_step_lacks_the_products_for_gradients_of_weights() -> None:
    """A backward pass through a product of matrices has two of its size, and one of them is for the weights."""
    load, text = STRIDE_3.training(derived.STEPS), ui_tars().text
    products = load.tokens * 2 * text.layers * text.layer_matrices + 2 * text.embedding * load.responses
    saved = products / (derived.GPUS * PEAKS["H100"] * derived.UTILISATION) / derived.STEPS
    frozen, lora = (derived.trainer_seconds(STRIDE_3, trains) for trains in ("language model", "adapter"))
    assert lora == pytest.approx(frozen - saved)
    assert derived.NAMED["honest-stride3-lora"].sync == derived.NAMED["honest-stride3"].sync


def test_set_ups_without_a_name_have_their_timings_as_ever() -> None:
    timings = efficiency.timings_for(8)
    assert timings == Timings()
    assert (timings.trainer.seconds_per_step, timings.replica.prefill_seconds, timings.sync.gigabytes) == (
        0.15,
        0.12,
        15.2,
    )
    assert efficiency.timings_for(16, "honest-sliding").trainer.seconds_per_step == pytest.approx(
        derived.trainer_seconds(SLIDING) / 2
    )


def test_named_set_ups_come_after_all_others_with_names_of_their_own() -> None:
    planned = [(set_up.name, rung, hours) for rung, set_up, _, _, hours in efficiency.runs(6.0)]
    assert len(set(planned)) == len(planned)
    named = [place for place in planned if "honest" in place[0]]
    assert planned[-len(named) :] == named
    assert {name for name, _, _ in named if not name.startswith("16 GPUs")} == {
        f"180 environments, {gpus} training GPUs, {name}" for gpus in (8, 18) for name in derived.NAMED
    }


def test_other_divisions_have_the_same_gpus() -> None:
    divisions = [(set_up, timings) for _, set_up, _, timings, _ in efficiency.runs(6.0) if "16 GPUs" in set_up.name]
    step = efficiency.timings_for(1, "honest-sliding").trainer.seconds_per_step
    found = [
        (set_up.replicas, round(step / timings.trainer.seconds_per_step))
        for set_up, timings in divisions
        if set_up.name.endswith("honest-sliding")
    ]
    assert found == [(16, 16), (16, 16), (6, 10), (5, 11), (4, 12)]


def test_the_same_gpus_have_a_table_of_their_own() -> None:
    def row(set_up: str, rung: str, actions: float) -> dict[str, object]:
        seconds = {"acting": 1.0, "resetting": 1.0, "generating": 2.0}
        return {
            "set_up": set_up, "rung": rung, "env_utilisation": 0.5, "rollout_utilisation": 0.5,
            "trainer_utilisation": 0.5, "trained_actions_per_minute": actions, "staleness": {"mean": 3.0},
            "time": {"env": {"seconds": seconds}},
        }  # fmt: skip

    halves = "180 environments, 8 training GPUs, honest-sliding"
    rows = [
        row(halves, "coupled", 50.0), row(halves, "decoupled", 100.0), row(halves, "decoupled, with curation", 1.0),
        row("16 GPUs that sample and train in turn, honest-sliding", "coupled", 125.0),
        row("16 GPUs, 4 sample and 12 train, honest-sliding", "decoupled", 200.0),
    ]  # fmt: skip
    _, made = pages.same_gpus(rows)
    assert made == [
        ["8 sample and 8 train", "coupled", "50.0% (50.0%)", "50"],
        ["8 sample and 8 train", "decoupled", "50.0% (50.0%)", "100"],
        ["16 GPUs that sample and train in turn", "coupled", "50.0% (50.0%)", "125"],
        ["4 sample and 12 train", "decoupled", "50.0% (50.0%)", "200"],
    ], "waiting for the model is neither acting nor resetting"
