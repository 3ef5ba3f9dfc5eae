"""Errors that end one request, or the whole engine."""

from __future__ import annotations

from dart.errors import UserError


class EngineDiedError(UserError):
    """The engine process is gone, its weights are neither the old nor the new ones, or its GPUs' answers belong to
    other questions. The worker ends with it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"vLLM's engine has failed, and this worker ends with it: {why}; the engine's own lines above say more. "
            "Start the worker again (dart train does so by itself)",
            exit_code=1,
        )


class ContextFullError(ValueError):
    """The prompt is longer than `rollout.max_model_len`."""


class RequestAbortedError(Exception):
    """The request was ended before it was finished: by `abort`, or by an update that ends requests in flight."""


class RequestFailedError(Exception):
    """vLLM ended the request with an error; the request may be retried."""
