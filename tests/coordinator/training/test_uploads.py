"""Copies of checkpoints: complete or not there, as many as are kept, and a resumed run finds them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from dart import manifest
from dart.cli import main
from dart.coordinator.service.journal import Journal
from dart.coordinator.start import starting_point
from dart.coordinator.training.uploads import Uploads
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.elsewhere.copies import copies, copy_in
from dart.store.records import CheckpointRecord


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("s3_url") if request.param == "s3" else f"file://{tmp_path}/copies"


def checkpoint(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / f"v{version:06d}"
    with manifest.written(folder) as new:
        (new / "model.safetensors").write_bytes(bytes([version]) * 100_000)
        (new / "parts").mkdir()
        (new / "parts" / "trainer_state.pt").write_bytes(b"state")
        (new / "trainer_state.pt").write_bytes(b"state")
    return folder


def events(run: Path) -> str:
    return (run / "metrics.jsonl").read_text()


async def test_the_newest_are_kept_and_come_back(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    uploads = Uploads(f"{url}/run", 2, journal)
    for version in (1, 2, 3):
        await uploads.copy(checkpoint(tmp_path, version))
    journal.flush_lines()
    assert events(tmp_path).count("checkpoint_uploaded") == 3
    assert copies(f"{url}/run") == ["v000002", "v000003"]
    copy_in(f"{url}/run/v000003", tmp_path / "back")
    assert manifest.problem(tmp_path / "back") is None
    assert (tmp_path / "back" / "parts" / "trainer_state.pt").read_bytes() == b"state"
    journal.close()


@pytest.mark.parametrize(("start", "left"), [(2, ["v000002", "v000003"]), (0, ["v000003", "v000009"])])
async def test_copies_of_what_a_resumed_run_has_abandoned_go_first(
    tmp_path: Path, url: str, start: int, left: list[str]
) -> None:
    """The run went on at v2 because what came after it was damaged, or with its initial weights."""
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    before, after = Uploads(f"{url}/run", 3, journal), Uploads(f"{url}/run", 2, journal, start)
    for version in (2, 8, 9):
        await before.copy(checkpoint(tmp_path, version))
    await after.copy(checkpoint(tmp_path, 3))
    assert copies(f"{url}/run") == left
    for version in (4, 8):
        await after.copy(checkpoint(tmp_path, version))
    assert copies(f"{url}/run") == ["v000004", "v000008"]
    journal.close()


async def test_a_damaged_checkpoint_is_not_copied_and_the_run_goes_on(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    damaged = checkpoint(tmp_path, 1)
    (damaged / "model.safetensors").write_bytes(b"short")
    await Uploads(f"{url}/run", 2, journal).copy(damaged)
    journal.flush_lines()
    assert "checkpoint_upload_failed" in events(tmp_path) and "5 bytes of 100000" in events(tmp_path)
    assert copies(f"{url}/run") == []
    journal.close()


async def test_a_resumed_run_takes_the_copy_of_a_checkpoint_that_is_lost(tmp_path: Path, url: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    journal = Journal(run.metrics, 1)
    async with await run.open_to_work(create=True) as database:
        await database.start_run("run", "run", {}, started=1.0)
        folder = checkpoint(run.path, 5)
        await Uploads(f"{url}/key", 2, journal).copy(folder)
        await database.add_checkpoint(CheckpointRecord(str(folder), 5, time.time(), None))
        shutil.rmtree(folder)
        with pytest.raises(UserError, match="the folder is not there"):
            await starting_point(database, run)
        start = await starting_point(database, run, copies=f"{url}/key")
        assert (start.version, start.checkpoint) == (5, folder)
        assert manifest.problem(folder) is None
    journal.close()


async def test_export_takes_a_copy_by_its_url(tmp_path: Path, url: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", 1)
    await Uploads(f"{url}/run", 2, journal).copy(checkpoint(tmp_path, 7))
    journal.close()
    out = tmp_path / "out"
    told = CliRunner().invoke(main, ["export", f"{url}/run/v000007", str(out)])
    assert told.exit_code == 0, told.output
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "parts"]
    refused = CliRunner().invoke(main, ["export", f"{url}/run/v000008", str(tmp_path / "other")])
    assert refused.exit_code != 0 and "is no complete copy of a checkpoint" in refused.output
    assert not (tmp_path / "other").exists()
