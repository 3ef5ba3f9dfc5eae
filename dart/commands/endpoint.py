"""The command-line options for a model behind an OpenAI-compatible chat endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dart.coordinator.sampling.endpoint import chosen
from dart.job import Address


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """`--endpoint` and the options that go with it. None means not given."""

    endpoint: str | None = None
    endpoint_model: str | None = None
    endpoint_key: str | None = None
    endpoint_system: Path | None = None

    @property
    def given(self) -> Mapping[str, object]:
        """Option as it is written → its value, for the options that were given."""
        values = {
            "--endpoint": self.endpoint,
            "--endpoint-model": self.endpoint_model,
            "--endpoint-key": self.endpoint_key,
            "--endpoint-system": self.endpoint_system,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def words(self) -> list[str]:
        """The options as they are written, for a command line in another folder."""
        given = {
            **self.given,
            **({"--endpoint-system": self.endpoint_system.absolute()} if self.endpoint_system else {}),
        }
        return [str(word) for option in given.items() for word in option]

    def address(self, asker: str) -> Address:
        """The endpoint that was named. Raises UserError, naming `asker`, when an option is missing or wrong."""
        return chosen(asker, self.endpoint, self.endpoint_model, self.endpoint_key, self.endpoint_system)
