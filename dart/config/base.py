"""The base of every config section, and common field types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dart.errors import UserError

Positive = Annotated[int, Field(ge=1)]


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


Seconds = Annotated[float, Field(gt=0.0)]


class ConfigError(UserError):
    """The configuration is wrong; the message names field, value and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
