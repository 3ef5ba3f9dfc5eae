"""adb's own server for these tests, and a device for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from android.daemon import Device
from android.programs import device, own_adb


@pytest.fixture(scope="module")
def adb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_adb(tmp_path_factory.mktemp("adb")):
        yield


@pytest.fixture
def phone(adb: None, tmp_path: Path) -> Iterator[Device]:
    with device(tmp_path) as made:
        yield made
