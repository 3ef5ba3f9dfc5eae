"""Which screenshots of a trajectory can be shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from dashboards.made import execute, opened, small_run

from dart.inspection.opening import RunFiles


async def test_an_object_store_is_not_asked_for_each_screenshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await asyncio.to_thread(small_run, tmp_path)

    def asked(*_: object) -> bool:
        raise AssertionError("a request for one screenshot")

    execute(run, ("update trajectories set screenshots_kept = false where id = ?", ("g000001-2",)))
    monkeypatch.setattr(RunFiles, "are_local", False)
    monkeypatch.setattr(RunFiles, "holds", asked)
    async with opened(run) as it:
        first, second = (await it.group("g000001")).members[:2]
        assert first.row.id == "g000001-1" and all(step.image and step.image.held for step in first.steps)
        assert second.row.id == "g000001-2" and not any(step.image and step.image.held for step in second.steps)
        steps = (await it.trajectory("g000001-1")).steps
        assert all(step.image and step.image.held for step in steps)
        assert not any("were looked for" in note for note in (await it.overview()).missing)


async def test_a_row_shows_the_last_screen_that_there_is(tmp_path: Path) -> None:
    run = await asyncio.to_thread(small_run, tmp_path)
    async with opened(run) as it:
        before = await it.trajectory("g000001-1")
    screens = [step.image for step in before.steps if step.image]
    assert before.last_image is None and before.row.thumbnail == screens[-1].sha256
    # The picture of another step stands for the one after the last action, because its bytes are there.
    kept = json.dumps({"goal_images": 0, "last_image": [screens[0].sha256, "image/png", 160, 100]})
    execute(
        run,
        ("update trajectories set more_json = ? where id in ('g000001-1', 'g000001-2')", (kept,)),
        ("update trajectories set screenshots_kept = false where id = 'g000001-2'", ()),
        ("update trajectories set more_json = '[]' where id = 'g000001-3'", ()),
    )
    async with opened(run) as it:
        detail = await it.trajectory("g000001-1")
        assert detail.last_image == screens[0]
        shown = {row.id: row.thumbnail for row in (await it.trajectories(limit=500)).rows}
    assert [shown[f"g000001-{number}"] for number in (1, 2, 3)] == [screens[0].sha256, "", ""]
    assert sum(bool(digest) for digest in shown.values()) > 190
