"""The GPU benchmarks, as far as a machine without GPUs can tell: everything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.record import file_of, record


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for one another take longer than these passes."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.torch
@pytest.mark.usefixtures("one_thread")
def test_every_measurement_runs_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu.__main__ import MEASUREMENTS, main

    main(["--device", "cpu", "--tiny", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "cpu-tiny.json").read_text())
    results = written["results"]
    assert list(results) == list(MEASUREMENTS)
    assert not {name: found["failed"] for name, found in results.items() if "failed" in found}
    assert "tiny" in written["real_or_simulated"]


@pytest.mark.torch
def test_without_a_gpu_the_full_width_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.gpu.__main__ import main

    with pytest.raises(SystemExit, match="add --tiny"):
        main(["--device", "cpu", "--output", str(tmp_path)])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU"):
            main(["--output", str(tmp_path)])


@pytest.mark.engine
def test_a_replica_is_measured_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu.replica import main

    main(["--device", "cpu", "--tiny", "--eager", "--output", str(tmp_path)])
    results = json.loads((tmp_path / "replica-cpu-tiny.json").read_text())["results"]
    assert list(results) == [
        "memory, eager", "decoding, eager", "prompts, eager", "episodes, stride 3, eager", "episodes, stride 1, eager",
    ]  # fmt: skip
    assert results["memory, eager"]["kv_cache_tokens"] > 0
    blocks, sliding = (results[f"episodes, stride {stride}, eager"] for stride in (3, 1))
    # Of seven steps, with at most five screenshots in a prompt, the window slides at two, or drops a block at one.
    # A thousand tokens of system text are cached in every step but the first.
    assert 0.95 > blocks["cached_share"] > sliding["cached_share"] + 0.01 > 0.5
    assert blocks["steps_per_second"] > 0


def test_a_later_run_replaces_only_what_it_measured(tmp_path: Path) -> None:
    path = file_of(tmp_path / "results", "shared", "NVIDIA H100 80GB HBM3")
    assert path.name == "shared-NVIDIA-H100-80GB-HBM3.json"
    assert file_of(tmp_path, "", "NVIDIA H200").name == "NVIDIA-H200.json"
    record(path, {"name": "one"}, "eager", {"ok": False})
    record(path, {"name": "one"}, "graphs", {"ok": True})
    record(path, {"name": "one"}, "eager", {"ok": True})
    record(path, {"name": "one"}, "fp8", {"ok": True}, "beside another run")
    written = json.loads(path.read_text())
    assert written["name"] == "one"
    assert {name: one["ok"] for name, one in written["results"].items()} == dict.fromkeys(
        ("eager", "graphs", "fp8"), True
    )
    assert written["results"]["fp8"]["measured"]["conditions"] == "beside another run"
    assert written["results"]["eager"]["measured"]["versions"]["python"]
