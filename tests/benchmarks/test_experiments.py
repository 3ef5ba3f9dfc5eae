"""What single experiments measure: times to a success, and the controls of the ablation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trial_samples import after, record

from benchmarks.learning import controls
from benchmarks.learning.wallclock import (
    Ratio,
    Target,
    WallclockProtocol,
    arrival,
    has_arrived,
    not_before,
    ratio,
    time_to,
    times,
)
from benchmarks.trials import base, findings, pages, records, showing, sweep
from benchmarks.trials.protocol import FOLDER, Protocol, as_options, load
from benchmarks.trials.records import Episode
from benchmarks.trials.sweep import Plan
from dart.errors import UserError

MARKS = {"protocol_sha256": "p", "config_sha256": "c", "base_sha256": "b"}
WALLCLOCK = load(FOLDER / "wallclock.yaml", WallclockProtocol)


def run(successes: list[int], tasks: list[str] | None = None, seconds: float = 1.0, **more: Any) -> Any:
    """Roll-outs of the tasks in turn, `seconds` apart; ten make an update."""
    tasks = tasks or ["a", "b"]
    episodes = [Episode(n * seconds, n % len(tasks), 5, one, n // 10) for n, one in enumerate(successes)]
    levels = {"easy": 1.0, "medium": 0.5, "hard": 0.2}
    return record("arm", 0, levels, MARKS) | {"tasks": tasks, "episodes": episodes, **more}


# ---- wall time ----


def test_the_schedules_are_the_baselines() -> None:
    coupled, decoupled, both = (
        WALLCLOCK.load_config(arm) for arm in ("coupled", "decoupled", "decoupled-with-curation")
    )
    assert (coupled.schedule.sampling, coupled.schedule.training, coupled.schedule.sync) == (
        "batch", "synchronous", "all")  # fmt: skip
    same = coupled.model_copy(update={"schedule": decoupled.schedule, "trainer": decoupled.trainer})
    assert same == decoupled, "the schedule and the size of a batch are all that differs"
    batch = {"trajectories_per_update": decoupled.trainer.trajectories_per_update, "minibatches": 1}
    assert coupled.trainer.model_copy(update=batch) == decoupled.trainer
    assert coupled.trainer.trajectories_per_update == 64, "the coupled batch fills the environments"
    assert coupled.trainer.minibatches == 2 and decoupled.trainer.minibatches == 1, "optimiser steps of equal size"
    assert both.schedule == decoupled.schedule and both.curation.pool.enabled and not decoupled.curation.pool.enabled
    for config in (coupled, decoupled, both):
        assert config.environment.delay.step_seconds == (0.5, 2.0) and config.environment.slots == 64


def test_the_batches_are_what_differs() -> None:
    protocol = load(FOLDER / "wallclock_batches.yaml", WallclockProtocol)
    decoupled, half, full = (protocol.load_config(arm) for arm in ("decoupled", "coupled-half", "coupled-full"))
    for coupled, steps in ((half, 1), (full, 2)):
        assert (coupled.schedule.sampling, coupled.schedule.training, coupled.schedule.sync) == (
            "batch", "synchronous", "all")  # fmt: skip
        trainer = coupled.trainer
        assert trainer.minibatches == steps and trainer.warmup_updates * steps == decoupled.trainer.warmup_updates
        own = {"trajectories_per_update": 24, "minibatches": 1, "warmup_updates": 8}
        same = {"schedule": decoupled.schedule, "trainer": trainer.model_copy(update=own)}
        assert coupled.model_copy(update=same) == decoupled
        assert trainer.trajectories_per_update == decoupled.environment.slots * steps // 2
    assert all(target.sustained for target in protocol.targets)


LADDER = ["ladder-medium-01", "ladder-medium-02", "ladder-medium-03", "ladder-easy-01"]
MEDIUM = Target(levels=("medium",), success=0.75, smoothing=4)


def test_the_time_is_that_of_the_targets_tasks_alone() -> None:
    """Medium tasks succeed from the 40th roll-out on; the easy one never does, and does not matter."""
    successes = [int(n >= 40 and n % 4 != 3) for n in range(80)]
    found = arrival(run(successes, LADDER, seconds=2.0), MEDIUM, WALLCLOCK)
    # Three quarters of each medium task's last four, from roll-outs 36 to 50, at the middle of these.
    assert found is not None and found.seconds == 2.0 * 43 and found.updates == pytest.approx(46 / 12)
    assert time_to(run([0] * 80, LADDER), MEDIUM, WALLCLOCK) is None
    both = Target(levels=("medium", "easy"), success=0.1, smoothing=4)
    assert time_to(run([1] * 80, LADDER), both, WALLCLOCK) is not None
    unsampled = Target(levels=("medium",), success=0.1, smoothing=4)
    assert time_to(run([1] * 80, LADDER[:2]) | {"tasks": LADDER}, unsampled, WALLCLOCK) is None


def test_successes_that_finish_first_are_no_success() -> None:
    """Of four roll-outs of each task that begin together successes end first, and fill half a window."""
    begin = [1] * 6 + [0] * 6
    assert time_to(run(begin, LADDER[:3], seconds=1.0), MEDIUM, WALLCLOCK) is None


def test_a_slow_schedule_has_no_lag_of_its_window() -> None:
    """Success rises at the same moment, whether it is looked at every second or every four."""
    quick = time_to(run([int(n >= 400) for n in range(800)], LADDER[:3], 1.0), MEDIUM, WALLCLOCK)
    slow = time_to(run([int(n >= 100) for n in range(200)], LADDER[:3], 4.0), MEDIUM, WALLCLOCK)
    assert quick is not None and slow is not None and slow - quick < 4.0 * 4 * 3 / 2


def late(at: int, seconds: float) -> Any:
    return run([int(n >= at) for n in range(600)], LADDER, seconds, train_seconds=600 * seconds)


def test_a_run_that_never_arrives_bounds_when_it_would_have() -> None:
    """The next roll-outs could have completed a window that began long before the run's end."""
    never = run([0] * 79, LADDER, 2.0, train_seconds=160.0)
    bound = not_before(never, MEDIUM, WALLCLOCK)
    soon = arrival(run([int(n >= 68) for n in range(79)], LADDER, 2.0), MEDIUM, WALLCLOCK)
    assert soon is not None and soon.seconds == bound == 2.0 * 71, "as if the last window had been the first good one"
    assert not_before(run([], LADDER, train_seconds=160.0), MEDIUM, WALLCLOCK) == 160.0
    one = run([0], LADDER, train_seconds=160.0)
    assert not_before(one, MEDIUM, WALLCLOCK) == pytest.approx(160.0 * 11 / 12), "the other eleven would come later"


def test_success_that_goes_away_again_is_not_sustained() -> None:
    """A lucky stretch of a window's length, and later success that stays."""
    stays = MEDIUM.model_copy(update={"sustained": True})
    lucky = [int(60 <= n < 78 or n >= 300) for n in range(600)]
    whole = run(lucky, LADDER, 1.0, train_seconds=600.0)
    first, last = time_to(whole, MEDIUM, WALLCLOCK), time_to(whole, stays, WALLCLOCK)
    assert first is not None and last is not None and first < 80 and last > 280
    assert time_to(late(40, 1.0), stays, WALLCLOCK) == time_to(late(40, 1.0), MEDIUM, WALLCLOCK)
    # Too little came after the last success to tell: it may have been there by then.
    short = run(lucky[:312], LADDER, 1.0, train_seconds=312.0)
    assert time_to(short, stays, WALLCLOCK) is None
    arrived = time_to(short, MEDIUM.model_copy(update={"success": 0.5}), WALLCLOCK)
    assert arrived is not None and not_before(short, stays, WALLCLOCK) >= 280


def test_ratios_are_paired_and_censored_runs_bound_them() -> None:
    pair = ("decoupled", "coupled")
    quick = {0: late(40, 1.0), 1: late(60, 1.0)}
    slow = {0: late(40, 3.0), 1: late(60, 3.0)}
    found = ratio({"decoupled": quick, "coupled": slow}, pair, MEDIUM, WALLCLOCK)
    assert found is not None and found.ratio == pytest.approx(3.0) and found.low == pytest.approx(3.0)
    assert not found.at_least and found.high == pytest.approx(3.0) and found.seeds == 2

    never = {0: late(40, 3.0), 1: late(999, 3.0)}
    bound = ratio({"decoupled": quick, "coupled": never}, pair, MEDIUM, WALLCLOCK)
    assert bound is not None and bound.at_least and bound.ratio is not None and bound.ratio > 3.0
    assert bound.low is None and bound.high is None, "a t-interval would take the end of the run for an observed time"
    none = ratio({"decoupled": never, "coupled": slow}, pair, MEDIUM, WALLCLOCK)
    assert none is not None and none.ratio is None
    assert ratio({"decoupled": quick}, pair, MEDIUM, WALLCLOCK) is None


def test_a_run_has_arrived_once_it_has_reached_every_target() -> None:
    assert [target.success for target in WALLCLOCK.targets] == [0.3, 0.5]
    for fifths, arrived in ((0, False), (2, False), (3, True)):
        assert has_arrived(run([int(n % 5 < fifths) for n in range(400)], LADDER), WALLCLOCK) == arrived


def test_every_run_has_its_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = times({"coupled": {0: late(999, 1.0)}, "decoupled": {0: late(0, 1.0)}}, WALLCLOCK)
    for measure in ("seconds", "updates"):
        assert found[measure]["medium at 30%"]["coupled"] == {"0": None}
        assert found[measure]["medium at 30%"]["decoupled"]["0"] is not None
    assert Ratio(**found["ratios"][0]).at_least
    told: Any = {"complete": False, "missing": ["coupled-1"], **found}
    head, rows = pages.times(told)
    assert all(len(row) == len(head) for row in rows)
    assert rows[0][:4] == ["medium at 30%", "coupled", "never", ""] and rows[0][4].startswith("decoupled: at least ")
    showing.show((head, rows))
    assert "decoupled: at least" in capsys.readouterr().out, "in a pipe, too, where no terminal says how wide it is"


def test_pairs_and_targets_name_what_there_is() -> None:
    raw = WALLCLOCK.model_dump()
    with pytest.raises(ValueError, match="pairs: tightly is no arm"):
        WallclockProtocol.model_validate(raw | {"pairs": [("decoupled", "tightly")]})
    with pytest.raises(ValueError, match="targets: extreme is no level"):
        WallclockProtocol.model_validate(raw | {"targets": [raw["targets"][0] | {"levels": ("extreme",)}]})


# ---- controls ----

ABLATION = load(FOLDER / "ablation.yaml", Protocol)


def test_imitation_differs_from_own_pool_in_its_loss_alone() -> None:
    own_pool, imitation = (ABLATION.load_config(arm) for arm in ("own-pool", "imitation"))
    loss = own_pool.trainer.loss.model_copy(
        update={
            "kind": "benchmarks.learning.imitation:own_successes",
            "kl_coefficient": 0.0,
            "entropy_quantile": 0.0,
            "importance": "none",
        }
    )
    trainer = own_pool.trainer.model_copy(update={"loss": loss})
    assert imitation == own_pool.model_copy(update={"trainer": trainer})
    assert imitation.stop.env_steps == ABLATION.load_config("full").stop.env_steps


def test_per_step_credit_differs_from_full_in_its_advantage_alone() -> None:
    full, credit = (ABLATION.load_config(arm) for arm in ("full", "per-step-credit"))
    advantage = full.trainer.advantage.model_copy(update={"kind": "gigpo"})
    assert credit == full.model_copy(update={"trainer": full.trainer.model_copy(update={"advantage": advantage})})


@pytest.mark.torch
def test_only_successes_are_imitated() -> None:
    torch = pytest.importorskip("torch")
    from dart.algo.objectives import Tokens, find
    from dart.algo.steps import Steps

    objective = find("benchmarks.learning.imitation:own_successes")
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    steps = Steps(torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    old = new.detach()
    value = objective(Tokens(new, torch.exp(new - old), old, old, torch.tensor([0.4, 0.4, -2.0]), steps), 0.2, 0.28)
    assert value.tolist() == [-1.0, -2.0, 0.0]
    value.sum().backward()
    assert new.grad.tolist() == [1.0, 1.0, 0.0], "whatever the advantage, and nothing for a failure"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Plan]:
    """The plans of the ablation's arms and of its controls, with some runs and evaluations of both."""
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    arms, controls = (
        Plan("learning/ablation", ABLATION.config, dict.fromkeys(names, ()), ABLATION.seeds, MARKS)
        for names in (ABLATION.arms, ABLATION.controls)
    )
    arms.results.mkdir(parents=True)
    for arm, medium in (("full", 0.9), ("none", 0.5), ("imitation", 0.6)):
        for seed in range(4):
            levels = {"easy": 1.0, "medium": medium + seed / 100, "hard": 0.2}
            sweep.write_json(arms.record(arm, seed), record(arm, seed, levels, MARKS))
    settings = [*as_options(ABLATION.settings)]
    for temperature, medium in (("0", 0.5), ("0.5", 0.6)):
        success = after({"easy": 0.9, "medium": medium, "hard": 0.0})["sampled"]
        asked = [*settings, f"evaluation.temperature={temperature}"]
        made = {**MARKS, "asked": asked, "evaluation": {"success": success}}
        sweep.write_json(arms.results / f"base-at-{temperature}.json", made)
    return arms, controls


def test_controls_are_reported_beside_the_ablation(
    kept: tuple[Plan, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controls.report(*kept, ABLATION)
    assert "incomplete: 23 runs are missing" in capsys.readouterr().out
    results = json.loads((tmp_path / "learning" / "controls.json").read_text())["results"]
    assert not results["complete"] and "imitation-4" in results["missing"]
    assert {"full-4", "none-4", "without-pool-4"} < set(results["missing"]), "with which the controls are compared"
    assert "without-length-0" not in results["missing"] and results["notes"] == []
    assert results["temperatures"]["0.5"] == {"easy": 0.9, "medium": pytest.approx(0.6), "hard": 0.0,
                                              "all": pytest.approx((15 * 0.9 + 3 * 0.6) / 21)}  # fmt: skip
    first = results["comparisons"][0]
    assert (first["reference"], first["arm"], first["p_holm"]) == ("full", "imitation", None)
    assert first["difference"]["mean"] == pytest.approx(0.15)


def test_controls_are_complete_with_the_arms_that_they_are_compared_with(
    kept: tuple[Plan, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms, of_controls = kept
    monkeypatch.setattr(controls, "TEMPERATURES", (0.0, 0.5))
    for arm in (*ABLATION.controls, "full", "none", "without-pool"):
        for seed in ABLATION.seeds:
            plan = of_controls if arm in ABLATION.controls else arms
            sweep.write_json(plan.record(arm, seed), record(arm, seed, {"easy": 1, "medium": 1, "hard": 1}, MARKS))
    for left in (None, "none-2", "full-0"):
        if left:
            (arms.results / f"{left}.json").unlink()
        controls.report(*kept, ABLATION)
        results = json.loads((tmp_path / "learning" / "controls.json").read_text())["results"]
        assert results["complete"] is (left is None) and (left is None or left in results["missing"])


def test_what_the_algorithm_does_without_a_gift_is_compared() -> None:
    """As the protocol promises: own-pool above `none`, and above imitation of the policy's own successes."""
    medium = {
        "own-pool": 0.8, "none": 0.5, "without-pool": 0.7, "imitation": 0.6, "full": 0.9, "pool-imitation": 0.7
    }  # fmt: skip
    runs = {
        arm: {seed: record(arm, seed, {"easy": 1.0, "medium": value, "hard": 0.2}, MARKS) for seed in range(2)}
        for arm, value in medium.items()
    }
    found = controls.comparisons(runs, ABLATION)
    sampled = {(one.reference, one.arm): one for one in found if one.endpoint == "medium and hard, sampled"}
    assert sampled["own-pool", "none"].difference.mean == pytest.approx(0.15)
    assert sampled["own-pool", "imitation"].difference.mean == pytest.approx(0.1)
    assert sampled["own-pool", "without-pool"].difference.mean == pytest.approx(0.05)
    assert ("none", "own-pool") not in sampled, "the same difference the other way round"
    assert {("full", "own-pool"), ("none", "imitation"), ("full", "pool-imitation")} < sampled.keys()
    assert not any(one.primary or one.p_holm is not None for one in found)


def test_an_evaluation_of_another_kind_is_not_taken_for_the_kept_one(kept: tuple[Plan, Plan]) -> None:
    other = ABLATION.model_copy(update={"settings": ABLATION.settings | {"curation.step_limit": 15}})
    with pytest.raises(UserError, match=r"base-at-0\.json was evaluated with .* remove it"):
        base.held_out(kept[0], other, 0.0)


def test_nothing_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    empty = Plan("learning/ablation", ABLATION.config, {"imitation": ()}, (0, 1), MARKS)
    with pytest.raises(UserError, match="nothing is finished yet"):
        controls.report(empty, empty, ABLATION)


@pytest.mark.parametrize("name", ["ablation", "wallclock", "wallclock_batches"])
def test_what_is_kept_of_the_runs_makes_what_the_pages_say(name: str) -> None:
    kind = Protocol if name == "ablation" else WallclockProtocol
    protocol, folder = load(FOLDER / f"{name}.yaml", kind), pages.RESULTS / name
    runs = {
        arm: {seed: records.load(folder / f"{arm}-{seed}.json") for seed in protocol.seeds} for arm in protocol.arms
    }
    found: dict[str, Any] = findings.as_json(runs, protocol, [])
    found |= times(runs, protocol) if isinstance(protocol, WallclockProtocol) else {}
    recorded = json.loads((pages.RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]
    assert json.loads(json.dumps(found)).items() <= recorded.items()
