"""Which screenshots of a trajectory can be shown."""

from __future__ import annotations

import asyncio
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
