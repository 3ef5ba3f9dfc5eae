"""MLflow. Without MLFLOW_TRACKING_URI it keeps a SQLite file in the run directory (`mlflow ui --backend-store-uri`)."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from pydantic import JsonValue

from dart.store.records import RunState
from dart.trackers.base import Picture, Tracked

MOST_METRICS = 500
"""A request takes at most a thousand."""

_ENDED: Mapping[str, str] = {RunState.FAILED: "FAILED", RunState.INTERRUPTED: "KILLED"}
LONGEST_NAME = 250
"""Characters of a metric's name."""


def allowed(name: str) -> str:
    """A metric's name as MLflow takes it: some characters only, not too long, and no path that means another ("a//b").

    A name that must change also gets a digest, so that two tasks do not become one.
    """
    section, slash, rest = name.partition("/")
    kept = re.sub(r"[^\w.\- :/]", "_", rest)
    if posixpath.normpath(f"{section}/{kept}") != f"{section}/{kept}":
        kept = re.sub(r"[/.]", "_", kept)
    changed = f"{section}{slash}{kept}"
    if changed == name and len(name) <= LONGEST_NAME:
        return name
    return f"{changed[: LONGEST_NAME - 7]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


class MLflow:
    def __init__(self, tracked: Tracked) -> None:
        tracked.folder.mkdir(parents=True, exist_ok=True)
        own = f"sqlite:///{tracked.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", own))
        experiment = self._client.get_experiment_by_name(tracked.project)
        if experiment is not None:
            self._experiment = experiment.experiment_id
        else:
            local = None if "MLFLOW_TRACKING_URI" in os.environ else (tracked.folder / "artifacts").as_uri()
            self._experiment = self._client.create_experiment(tracked.project, artifact_location=local)
        found = self._client.search_runs([self._experiment], f"tags.`dart.run` = '{tracked.id}'", max_results=1)
        if found:
            self._run: str = found[0].info.run_id
            if not tracked.over:
                self._client.update_run(self._run, status="RUNNING")
        else:
            made = self._client.create_run(self._experiment, run_name=tracked.name, tags={"dart.run": tracked.id})
            self._run = made.info.run_id
            self._client.log_dict(self._run, dict(tracked.config), "config.json")

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [Metric(allowed(name), value, now, update) for name, value in values.items()]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics[first : first + MOST_METRICS])

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None:
        for number, picture in enumerate(pictures):
            self._client.log_image(self._run, picture.image, f"trajectories/{update:06d}-{number}.png")
            self._client.log_text(self._run, picture.caption, f"trajectories/{update:06d}-{number}.txt")

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        self._client.log_dict(self._run, dict(summary), "summary.json")
        if curve is not None:
            self._client.log_artifact(self._run, str(curve))
        self._client.set_terminated(self._run)

    def close(self, state: str) -> None:
        """Every request has been sent already, and one that finished has been ended with its outcome."""
        if ended := _ENDED.get(state):
            self._client.set_terminated(self._run, status=ended)
