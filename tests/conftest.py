"""Settings for all tests: no time limit for an example, and no temporary folder that others use, because machines are
shared and noisy."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from store_servers import object_store_server, postgresql_server, s3_url, stores

__all__ = ["object_store_server", "postgresql_server", "s3_url", "stores"]

settings.register_profile("dart", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dart")


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Browsers and desktops remove what killed workers left in the temporary folder: of another test process, too."""
    tmp_path_factory.getbasetemp()  # stays where pytest puts it
    with (
        tempfile.TemporaryDirectory(prefix="dt-", ignore_cleanup_errors=True) as folder,  # short: sockets lie below it
        pytest.MonkeyPatch.context() as patch,
    ):
        Path(folder).chmod(0o711)  # PostgreSQL, which does not run as root, has its folder below it
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def logging_enabled_afterwards() -> Iterator[None]:
    """A benchmark called in this process may disable logging; the next test needs it again."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Some tests log words that UTF-8 cannot encode, and pytest-xdist could not send those to its main process."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report
