"""What the trainer is sent: pages that fit into messages, and every screenshot's bytes once."""

from __future__ import annotations

from collections import Counter

import pytest

from dart.coordinator.training.ranks import PAGE_BYTES, _pages
from dart.core.curation.batches import Sample
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan

GENERATION = Generation((1,) * 50, (3, 4), (-0.5, -0.25), (VersionSpan(0, 0, 2),), "t")


def samples(trajectories: int, steps: int, image_bytes: int, history: int = 5) -> list[Sample]:
    made = []
    for number in range(trajectories):
        images = [
            Image.of(f"{number}/{step}".encode().ljust(image_bytes, b"."), "image/png", 2, 2) for step in range(steps)
        ]
        all_steps = tuple(
            Step(step, tuple(images[max(0, step - history + 1) : step + 1]), GENERATION, None) for step in range(steps)
        )
        one = Trajectory(
            f"t{number}", "g", Task("s", "a"), "do", all_steps, Termination.ENVIRONMENT, 1.0, True, 9, 0, 1
        )
        made += [Sample(one, step, 0.5) for step in all_steps]
    return made


@pytest.mark.parametrize("once", [True, False])
def test_pages_hold_every_sample_and_fit_into_messages(once: bool) -> None:
    wanted = samples(3, 20, 1 << 20)
    pages = _pages(wanted, once)
    sent = [sample for page in pages for sample in page.train_batch.samples]
    assert [(one.trajectory_id, one.step_index) for one in sent] == [(s.trajectory.id, s.step.index) for s in wanted]
    assert all(page.ByteSize() <= PAGE_BYTES for page in pages)
    carried = Counter(image.sha256 for one in sent for image in one.images if image.data)
    everywhere = Counter(image.sha256 for one in wanted for image in one.step.images)
    assert carried == (Counter(set(everywhere)) if once else everywhere)
    assert [[image.sha256 for image in one.images] for one in sent] == [
        [image.sha256 for image in one.step.images] for one in wanted
    ]


def test_a_share_without_samples_is_one_empty_page() -> None:
    (page,) = _pages([], once=True)
    assert page.WhichOneof("body") == "train_batch"
