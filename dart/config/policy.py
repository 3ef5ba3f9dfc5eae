"""The policy: its model, how it is prompted and read, and the replicas that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dart.config.base import Positive, Seconds, Section
from dart.core.action import MOST_TOGETHER

BUILTIN_MODELS = Path(__file__).parents[1] / "assets"


Shown = Literal["accessibility_tree", "last_action_error"]


class Model(Section):
    path: str = Field(
        description="A Hugging Face folder, at the same path on every machine that loads the model, or builtin:NAME "
        "for one that ships with dart."
    )
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="The dtype of replicas and trainer.")

    @property
    def folder(self) -> Path:
        if self.path.startswith("builtin:"):
            return BUILTIN_MODELS / self.path.removeprefix("builtin:")
        return Path(self.path)


class Agent(Section):
    grammar: Literal["ui_tars", "qwen3_vl"] = Field("ui_tars", description="How the policy writes its actions.")
    read: Literal["reference", "strict"] = Field(
        "reference",
        description="`reference` also accepts what the model family's own harness accepts (docs/grammars.md); `strict` "
        "accepts one form alone, for models that are trained on it from the start.",
    )
    coordinates: Literal["pixels", "thousand"] = Field(
        "pixels", description="UI-TARS 1.5 uses pixels of the resized screenshot, UI-TARS 1.0 a 0-1000 grid."
    )
    prompt: Literal["ui_tars", "qwen3_vl", "minimal"] = Field(
        "ui_tars", description="The prompt template; `minimal` has no system text, for models made for one task."
    )
    actions_per_step: int = Field(
        1,
        ge=1,
        le=MOST_TOGETHER,
        description="The most actions of one turn that are carried out before the next screenshot, where the text has "
        "several (docs/grammars.md); 1: the first alone. Only for `read: reference`.",
    )
    history_screenshots: Positive = Field(5, description="Screenshots in the prompt, including this step's.")
    history_turns: Positive = Field(35, description="Earlier turns whose text is in the prompt.")
    show: tuple[Shown, ...] = Field(
        (),
        description="Texts of the environment that stand after each screenshot in the prompt, if the world gives them: "
        "`accessibility_tree`, `last_action_error`. A model must have been trained with them.",
    )
    shown_characters: Positive = Field(
        16_384, description="The most characters of each of these texts; what is cut off is said."
    )
    goal_images: int = Field(
        0,
        ge=0,
        le=16,
        description="The most pictures that may belong to an instruction (image goals). A task with more cannot be "
        "run. Engines reserve memory for this many in addition to the screenshots.",
    )
    resize_multiple: Positive = Field(
        28,
        description="Must match the model's preprocessor_config.json, so that coordinates agree: both sides of a "
        "resized screenshot are multiples of this (pixels).",
    )
    max_pixels: Positive = Field(
        16384 * 28 * 28, description="The most pixels of a resized screenshot, as in preprocessor_config.json."
    )
    min_pixels: Positive = Field(
        100 * 28 * 28, description="The fewest pixels of a resized screenshot, as in preprocessor_config.json."
    )


class Rollout(Section):
    replicas: Positive = Field(1, description="The number of vLLM engines; each is a roll-out worker.")
    temperature: float = Field(1.0, gt=0.0, description="Used for sampling and for the log-probabilities in training.")
    max_tokens: Positive = Field(512, description="The most tokens to sample per step.")
    slots: Positive = Field(32, description="The most requests at one replica at once.")
    max_model_len: Positive = Field(32768, description="The most tokens of prompt and answer together.")
    tensor_parallel: Positive = Field(1, description="GPUs per replica.")
    kv_cache_bytes: int | None = Field(None, description="Size of the KV cache; none: vLLM decides.")
    processor_cache_bytes: int = Field(
        4 << 30,
        ge=0,
        description="Memory for preprocessed screenshots in each of vLLM's processes; it fills up over hours.",
    )
    enforce_eager: bool = Field(False, description="true: run vLLM without CUDA graphs.")
    image_cache_entries: Positive = Field(4096, description="Screenshots that a replica caches by digest.")
    environment: dict[str, str] = Field(default_factory=dict, description="Extra environment variables.")
    startup_timeout_seconds: Seconds = Field(
        600.0, description="A replica whose engine is not ready within this time is ended and started again."
    )
