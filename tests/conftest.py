"""Settings for all tests: no time limit for an example, because machines are shared and noisy."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from store_servers import object_store_server, postgresql_server, s3_url, stores

__all__ = ["object_store_server", "postgresql_server", "s3_url", "stores"]

settings.register_profile("dart", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dart")


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
