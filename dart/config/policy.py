"""The policy: its model, how it is prompted and read, and the replicas that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from dart.config.base import Positive, Seconds, Section
from dart.config.engine_args import refused
from dart.core.action import MOST_TOGETHER

BUILTIN_MODELS = Path(__file__).parents[1] / "assets"


LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM samples at the first where it is asked for a lower one, but not at 0, and refuses those above the second."""
Shown = Literal["accessibility_tree", "last_action_error"]


class Model(Section):
    path: str = Field(
        description="A Hugging Face folder, at the same path on every machine that loads the model, or builtin:NAME "
        "for one that ships with dart."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="In which replicas and trainer compute. What trains is kept in float32."
    )

    @property
    def folder(self) -> Path:
        if self.path.startswith("builtin:"):
            return BUILTIN_MODELS / self.path.removeprefix("builtin:")
        return Path(self.path)


BUILT_IN_PROMPTS = ("ui_tars", "qwen3_vl", "minimal")
INSTRUCTION, NOTE = "{instruction}", "{note}"
"""Placeholders of a prompt of one's own."""
_STRUCTURE = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _without_structure(text: str) -> str:
    if found := next((token for token in _STRUCTURE if token in text), None):
        raise ValueError(f"{found} would end or begin a message: leave it out")
    return text


class PromptTexts(Section):
    """A prompt of one's own: what stands before the first screenshot. Its file has these two texts as YAML."""

    system: str = Field(description="The system message. `{note}`, at most once, is where `agent.note` stands.")
    user: str = Field(description="The first user message, with `{instruction}` exactly once.")

    @field_validator("system", "user")
    @classmethod
    def _texts_alone(cls, text: str) -> str:
        return _without_structure(text)

    @model_validator(mode="after")
    def _placeholders(self) -> PromptTexts:
        if (times := self.user.count(INSTRUCTION)) != 1 or INSTRUCTION in self.system:
            where = f"{times} times in user" if INSTRUCTION not in self.system else "in system"
            raise ValueError(f"{INSTRUCTION} stands {where}: the task's instruction stands once, in user")
        if self.system.count(NOTE) > 1 or NOTE in self.user:
            raise ValueError(f"{NOTE} stands more than once or in user: it stands at most once, in system")
        return self


class Agent(Section):
    grammar: Literal["ui_tars", "qwen3_vl"] = Field("ui_tars", description="How the policy writes its actions.")
    read: Literal["reference", "strict"] = Field(
        "reference",
        description="`reference` also accepts what the model family's own harness accepts (docs/grammars.md); `strict` "
        "accepts only one form, for models that are trained on it from the start.",
    )
    coordinates: Literal["pixels", "thousand"] = Field(
        "pixels",
        description="UI-TARS 1.5 uses pixels of the resized screenshot, UI-TARS 1.0 a 0-1000 grid. Only for "
        "`grammar: ui_tars`: `qwen3_vl` has a grid of its own.",
    )
    prompt: str = Field(
        "ui_tars",
        min_length=1,
        description="The prompt template: `ui_tars`, `qwen3_vl`, or `minimal`, which has no system text, for models "
        "made for one task. Or a YAML file with a prompt of your own (docs/grammars.md), relative to the config.",
    )
    template: PromptTexts | None = Field(
        None, description="Contents of the file that `prompt` names. Leave it out: the run's own config.yaml has it."
    )
    note: str = Field(
        "",
        description="Text that is appended to the system prompt, for example a password that the tasks need. "
        "`minimal` has no place for it.",
    )
    actions_per_step: int = Field(
        1,
        ge=1,
        le=MOST_TOGETHER,
        description="The most actions of one turn that are carried out before the next screenshot, if its text has "
        "several (docs/grammars.md); 1: only the first. Only for `read: reference`.",
    )
    history_screenshots: Positive = Field(5, description="Screenshots in the prompt, including this step's.")
    history_turns: Positive = Field(35, description="Earlier turns whose text is in the prompt.")
    history_stride: Positive = Field(
        1,
        description="How many screenshots leave the prompt at once, with the turns that no longer fit. 1: the "
        "window slides at every step, so no prompt continues the one before. With 3, and 5 for `history_screenshots`, "
        "a prompt has 3 to 5 screenshots, and two steps in three continue the prompt before, so that roll-out and "
        "trainer compute much less (docs/efficiency.md). At most the screenshots that a prompt may have.",
    )
    show: tuple[Shown, ...] = Field(
        (),
        description="Texts of the environment that stand after each screenshot in the prompt, if the world gives them: "
        "`accessibility_tree`, `last_action_error`. A model must have been trained with them.",
    )
    shown_characters: Positive = Field(
        16_384, description="The most characters of each of these texts; a longer one is cut, and says so."
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

    @field_validator("note")
    @classmethod
    def _note_alone(cls, note: str) -> str:
        return _without_structure(note)

    @model_validator(mode="after")
    def _together(self) -> Agent:
        own = self.prompt not in BUILT_IN_PROMPTS
        if own and self.template is None:
            raise ValueError(f"prompt {self.prompt} is none of {', '.join(BUILT_IN_PROMPTS)} and has not been read")
        if not own and self.template is not None:
            raise ValueError(f"template is set, and prompt {self.prompt} is built in: name a file, or omit template")
        most = min(self.history_screenshots, self.history_turns + 1)
        if self.history_stride > most:
            raise ValueError(
                f"history_stride is {self.history_stride}, and a prompt has at most {most} screenshots "
                f"(history_screenshots {self.history_screenshots}, history_turns {self.history_turns}), so that not "
                f"even this step's would be left: set it to {most} or less, or raise the other two"
            )
        if self.actions_per_step > 1 and self.read == "strict":
            raise ValueError(
                f"actions_per_step is {self.actions_per_step}, and read is strict, which takes exactly one action: set "
                "read: reference, or omit it"
            )
        if self.prompt in ("ui_tars", "qwen3_vl") and self.prompt != self.grammar:
            raise ValueError(
                f"prompt is {self.prompt}, and grammar is {self.grammar}, which cannot read what that prompt asks for: "
                f"set prompt: {self.grammar}"
            )
        if self.coordinates == "thousand" and self.grammar != "ui_tars":
            raise ValueError(
                f"coordinates is thousand, and grammar {self.grammar} has a grid of its own: omit coordinates"
            )
        if self.note and self.prompt == "minimal":
            raise ValueError("note is set, and prompt minimal has no system text: omit it, or use another prompt")
        return self


def check_temperature(temperature: float, otherwise: str = "") -> float:
    """Raises ValueError for one at which vLLM does not sample."""
    if LEAST_TEMPERATURE <= temperature <= MOST_TEMPERATURE:
        return temperature
    raise ValueError(f"vLLM samples at {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}{otherwise}: choose one of these")


class Rollout(Section):
    replicas: Positive = Field(1, description="The number of vLLM engines; each is a roll-out worker.")
    temperature: float = Field(
        1.0,
        description="Used for sampling and for the log-probabilities in training. From 0.01 to 2, as vLLM takes them.",
    )
    max_tokens: Positive = Field(512, description="The most tokens to sample per step.")
    slots: Positive = Field(32, description="The most requests at one replica at once.")
    max_model_len: Positive = Field(32768, description="The most tokens of prompt and answer together.")
    tensor_parallel: Positive = Field(
        1, description="GPUs among which each layer is split. A replica has this times `pipeline_parallel` GPUs."
    )
    pipeline_parallel: Positive = Field(
        1, description="Stages into which the layers are divided. Use `tensor_parallel` first, which is faster."
    )
    kv_cache_bytes: int | None = Field(None, description="Size of the KV cache; none: vLLM decides.")
    processor_cache_bytes: int = Field(
        4 << 30,
        ge=0,
        description="Host memory of each replica's engine process for prepared screenshots, 12.7 MB for one of "
        "1920 x 1080 with UI-TARS 1.5; it fills up over hours.",
    )
    encoder_cache_tokens: Positive | None = Field(
        None,
        description="An engine keeps the encodings of at least so many screenshot tokens, for later requests with the "
        "same screenshots; none: on a GPU, those of four prompts; on a CPU, what vLLM chooses.",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: vLLM multiplies the decoder's matrices in 8-bit floats, and quantises each new version. The "
        "trainer stays in `model.dtype`, and the importance weights correct for the difference (docs/machines.md).",
    )
    enforce_eager: bool = Field(False, description="true: run vLLM without CUDA graphs.")
    image_cache_entries: Positive = Field(
        4096, description="Screenshots that a replica keeps, so that they are sent once."
    )
    environment: dict[str, str] = Field(default_factory=dict, description="Extra environment variables of replicas.")
    engine_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Other arguments of vLLM's engine, by the names of its AsyncEngineArgs, for example "
        "`gpu_memory_utilization` or `max_num_batched_tokens` (docs/machines.md). Those that another field sets, or on "
        "which the trainer or weight updates rely, are refused.",
    )
    startup_timeout_seconds: Seconds = Field(
        600.0, description="A replica whose engine is not ready within this time is ended and started again."
    )
    wait_for_all_seconds: Seconds = Field(
        300.0,
        description="How long the run waits for the other replicas once one is ready. Those that come later join it.",
    )

    @property
    def gpus(self) -> int:
        """GPUs per replica, which are also the ranks of its engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @field_validator("temperature")
    @classmethod
    def _engine_samples_at_it(cls, temperature: float) -> float:
        return check_temperature(temperature)

    @field_validator("engine_args")
    @classmethod
    def _not_owned(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if problems := refused(arguments):
            raise ValueError("; ".join(problems))
        return arguments
