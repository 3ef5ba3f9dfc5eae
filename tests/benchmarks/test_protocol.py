"""Protocols: every shipped one is sound, wrong ones are refused, and results of another one too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.learning.wallclock import WallclockProtocol
from benchmarks.trials import command
from benchmarks.trials.protocol import FOLDER, Protocol, as_options, check_committed, check_marks, load, marks
from dart.config import Config
from dart.config import load as load_config
from dart.errors import UserError

ABLATION = FOLDER / "ablation.yaml"


def test_the_shipped_protocol_is_sound() -> None:
    protocol = load(ABLATION, Protocol)
    assert protocol.name == "ablation" and len(protocol.seeds) == 5
    for arm in (*protocol.arms, *protocol.controls):
        config = protocol.load_config(arm)
        steps = None if config.algorithm == "sft" else 60_000
        assert config.stop.env_steps == steps and config.curation.step_limit == 30
        assert not config.evaluation.before and config.evaluation.decodings == ("sampled", "greedy")


def test_the_ablation_is_the_one_that_was_designed() -> None:
    protocol = load(ABLATION, Protocol)
    assert list(protocol.arms) == ["none", "full", "without-number", "without-length", "without-pool"]
    assert protocol.family == 8
    full, none = (protocol.load_config(arm) for arm in ("full", "none"))
    assert (
        full.curation.dynamic_rollouts.enabled and full.curation.dynamic_length.enabled and full.curation.pool.enabled
    )
    assert full.trainer.loss.entropy_quantile == 0.2 and full.trainer.loss.importance == "truncated"
    assert not (
        none.curation.dynamic_rollouts.enabled or none.curation.dynamic_length.enabled or none.curation.pool.enabled
    )
    assert none.trainer.loss.entropy_quantile == 0 and none.trainer.loss.importance == "none"
    tasks = full.environment.tasks.names
    assert [len(protocol.tasks_of(level, tasks)) for level in protocol.levels] == [15, 3, 3]
    gates = protocol.gates
    assert gates is not None and (gates.greedy_at_most, gates.pass_at_most, gates.samples) == (0.05, 0.05, 1)


def test_an_arm_gets_the_oracles_pool_unless_it_names_sources_itself() -> None:
    protocol, pool = load(ABLATION, Protocol), Path("/runs/pool")

    def config(arm: str) -> Config:
        return load_config(protocol.config, command.with_pool(protocol.overrides(arm), pool))

    assert config("full").curation.pool.sources == (pool,) and config("own-pool").curation.pool.sources == ()
    imitation = config("pool-imitation")
    assert imitation.algorithm == "sft" and imitation.sft.sources == (pool,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "ful"}, "ful is no arm: they are full, none"),
        ({"against": ["full"]}, "full is compared with itself"),
        ({"seeds": [0, 1, 1]}, "has a seed twice"),
        ({"seeds": [0]}, "seeds"),
        ({"primary": [{"levels": ["extreme"], "decoding": "greedy"}]}, "extreme is no level"),
        ({"primary": [{"levels": ["hard"], "decoding": "beam"}]}, "sampled or greedy"),
        (
            {"levels": {"easy": "ladder-easy-*", "medium": "ladder-medium-*", "hard": "click-*"}},
            "click-\\* matches no task",
        ),
        (
            {"arms": {"full": {"curation.pol": False}, "none": {}}, "against": ["none"]},
            "curation.pol is not a known field",
        ),
        ({"alpah": 0.1}, "alpah"),
        ({"piece_minutes": 6}, "no part of a protocol: leave it out, and use --piece-minutes"),
    ],
)
def test_wrong_protocols_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = yaml.safe_load(ABLATION.read_text(encoding="utf-8")) | changes
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load(path, Protocol)


@pytest.mark.parametrize("name", ["ablation", "wallclock", "wallclock_batches"])
def test_runs_that_hang_end(name: str) -> None:
    """Else an experiment of days waits for one of them."""
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    config = load_config(Path(raw["config"]), as_options(raw["settings"]))
    assert config.watchdog.end_after_seconds == 600


def test_the_length_of_pieces_is_no_part_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "marks", lambda path, protocol: {})
    path = FOLDER / "wallclock.yaml"
    pieces, whole = load(ABLATION, Protocol), load(path, WallclockProtocol)
    assert command.plan_of(ABLATION, pieces).piece_seconds == 1800
    assert command.plan_of(ABLATION, pieces, piece_minutes=6).piece_seconds == 360
    assert command.plan_of(path, whole).piece_seconds is None
    with pytest.raises(UserError, match="a restart would bias runs of wallclock"):
        command.plan_of(path, whole, piece_minutes=6)


def test_runs_that_are_timed_are_not_made_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of `wallclock` on one machine would each take about twice as long, and no result would say so."""
    monkeypatch.setattr(command, "marks", lambda path, protocol: {})
    path = FOLDER / "wallclock.yaml"
    timed, pieces = load(path, WallclockProtocol), load(ABLATION, Protocol)
    assert command.plan_of(path, timed, jobs=1).jobs == command.plan_of(path, timed).jobs == 1
    assert command.plan_of(ABLATION, pieces, jobs=2).jobs == 2
    with pytest.raises(UserError, match=r"--jobs 2: .* wallclock .* 1 at a time"):
        command.plan_of(path, timed, jobs=2)
    with pytest.raises(UserError, match="--jobs 0"):
        command.plan_of(ABLATION, pieces, jobs=0)


def test_some_arms_can_be_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "marks", lambda path, protocol: {})
    plan = command.plan_of(ABLATION, load(ABLATION, Protocol))
    assert command.chosen(plan, None) is plan
    assert list(command.chosen(plan, ["without-pool", "none"]).arms) == ["none", "without-pool"]
    with pytest.raises(UserError, match="--arms own-pool: learning/ablation has no such arm: write some of none, full"):
        command.chosen(plan, ["own-pool", "full"])


def test_pieces_have_a_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablation", "--piece-minutes", "7.5"])
    assert command.arguments(None).piece_minutes == 7.5
    for wrong in ("0", "-1", "nan", "long"):
        monkeypatch.setattr(sys, "argv", ["ablation", f"--piece-minutes={wrong}"])
        with pytest.raises(SystemExit):
            command.arguments(None)
        assert f"{wrong} is not a number of minutes above 0" in capsys.readouterr().err


def test_an_experiment_has_other_protocols(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own, other = FOLDER / "wallclock.yaml", FOLDER / "wallclock_batches.yaml"
    monkeypatch.setattr(sys, "argv", ["wallclock"])
    assert command.arguments(None, own).protocol == own
    monkeypatch.setattr(sys, "argv", ["wallclock", "--protocol", "wallclock_batches"])
    assert command.arguments(None, own).protocol == other
    monkeypatch.setattr(sys, "argv", ["wallclock", "--protocol", "clock"])
    with pytest.raises(SystemExit):
        command.arguments(None, own)
    assert "clock is no protocol: write one of ablation, wallclock, wallclock_batches" in capsys.readouterr().err


def test_results_are_bound_to_protocol_config_and_base_policy(tmp_path: Path) -> None:
    raw = yaml.safe_load(ABLATION.read_text(encoding="utf-8"))
    config = tmp_path / "ladder.yaml"
    settings = yaml.safe_load(Path(raw["config"]).read_text(encoding="utf-8"))
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"weights")
    settings["model"]["path"] = str(base)
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    path = tmp_path / "ablation.yaml"
    path.write_text(yaml.safe_dump(raw | {"config": str(config)}), encoding="utf-8")
    before = marks(path, load(path, Protocol))

    path.write_text(path.read_text(encoding="utf-8") + "# said later\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"full-0.json was made with another protocol"):
        check_marks(tmp_path / "full-0.json", before, marks(path, load(path, Protocol)))

    before = marks(path, load(path, Protocol))
    (base / "model.safetensors").write_bytes(b"better weights")
    with pytest.raises(UserError, match="with another base policy"):
        check_marks(tmp_path / "full-0.json", before, marks(path, load(path, Protocol)))

    before = marks(path, load(path, Protocol))
    config.write_text(yaml.safe_dump(settings | {"run": {"name": "other"}}), encoding="utf-8")
    with pytest.raises(UserError, match="with another config"):
        check_marks(tmp_path / "full-0.json", before, marks(path, load(path, Protocol)))
    check_marks(tmp_path / "full-0.json", before, before)

    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match="make the base policy first"):
        marks(path, load(path, Protocol))


def test_a_protocol_has_to_be_committed(tmp_path: Path) -> None:
    path = tmp_path / "protocol.yaml"
    path.write_text("question: why\n")
    check_committed(path)  # no repository: nothing to check
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    with pytest.raises(UserError, match="commit it before the first run"):
        check_committed(path)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "said"], check=True)
    check_committed(path)
    path.write_text("question: what\n")
    with pytest.raises(UserError, match="commit it"):
        check_committed(path)
