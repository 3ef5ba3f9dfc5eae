"""Loading a vision-language checkpoint: weights, tokenizer, image processor; and what can be wrong with its folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.image_processing_utils import BaseImageProcessor

from dart.errors import UserError, first_line
from dart.wire.tokens import vision_token_ids
from dart.workers.train import vision
from dart.workers.train.batch import Layout
from dart.workers.train.kernels import linear
from dart.workers.train.policy import ENCODED


def check_folder(folder: Path) -> None:
    """Raises UserError unless the folder holds a vision-language checkpoint; loads no weights."""
    remedy = "set model.path to a Hugging Face folder of a vision-language model, or to builtin:NAME"
    if not folder.is_dir():
        raise UserError(f"model.path: folder {folder} does not exist: {remedy}")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json, so it is not a checkpoint: {remedy}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model.path: config.json in {folder} cannot be read ({first_line(error)}): {remedy}") from None
    if not hasattr(config, "vision_config") or not hasattr(config, "image_token_id"):
        raise UserError(f"model.path: {folder} is a {config.model_type} model, which sees no images: {remedy}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.path: {folder} has no *.safetensors weights: {remedy}")


def load_model(
    folder: Path, device: torch.device, prepare: Callable[[PreTrainedModel], None] = lambda _: None
) -> PreTrainedModel:
    """The checkpoint in float32 (master weights), no dropout. Raises UserError if weights and config disagree.

    prepare: what is done to it in host memory, before it moves to the device.
    """
    check_folder(folder)
    remedy = "the checkpoint is damaged or has another architecture: download or export it again"
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.path: weights in {folder} do not fit its config.json ({first_line(error)}): {remedy}"
        ) from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(str(name) for name in info[problem]):
            what = f"{len(names)} {problem.replace('_', ' ')}, the first is {names[0]}"
            raise UserError(f"model.path: weights in {folder} do not fit its config.json ({what}): {remedy}")
    _check_takes_encoded(model)
    # The trainer generates nothing, and transformers refuses to save a model with defaults that it only warns of here.
    model.generation_config = GenerationConfig()
    _speed_up(model, device)
    prepare(model)
    return model.to(device).eval()


def shell(folder: Path, device: torch.device) -> PreTrainedModel:
    """The checkpoint's model without weights: every tensor is on torch's `meta` device and takes no memory.

    `device`: where its weights will be. Call `check_folder` first.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    _check_takes_encoded(model)
    _speed_up(model, device)
    return model.eval()


def _check_takes_encoded(model: PreTrainedModel) -> None:
    """Raises UserError if the model would ignore the screenshots that it is given, as it does before transformers
    5.19: without an error, as if the prompts had none."""
    if ENCODED not in inspect.signature(model.model.forward).parameters:
        raise UserError(
            f"transformers {transformers.__version__} has no way to give {type(model).__name__} screenshots that are "
            "encoded already: install transformers 5.19 or newer (pip install 'transformers>=5.19')"
        )


def _speed_up(model: PreTrainedModel, device: torch.device) -> None:
    vision.speed_up(model)
    if device.type == "cpu":
        linear.speed_up(model)


def pairs_per_token(model: PreTrainedModel) -> float:
    """How many pairs of tokens take as many operations in the text model's attention (4 per pair, channel and layer)
    as one token takes in its linear layers (2 per weight)."""
    text = model.config.get_text_config()
    weights = sum(weight.numel() for weight in model.get_decoder().layers.parameters())
    of_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return float(2 * weights / (4 * text.num_attention_heads * of_head * text.num_hidden_layers))


def layout_of(model: PreTrainedModel, folder: Path) -> Layout:
    """The shape of the inputs of the folder's model. Raises UserError."""
    return Layout(
        vocab_size=model.config.get_text_config().vocab_size,
        image_token_id=model.config.image_token_id,
        merge_size=model.config.vision_config.spatial_merge_size,
        banned=load_banned_tokens(folder),
        pairs_per_token=pairs_per_token(model),
    )


def load_banned_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that roll-out engines never sample, so that their probability is 0 here as well. Raises UserError."""
    try:
        return vision_token_ids(AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {folder} has no tokenizer that loads ({first_line(error)}): add its tokenizer files"
        ) from None


def load_image_processor(folder: Path) -> BaseImageProcessor:
    """The checkpoint's own image processor. Raises UserError."""
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {folder} has no image processor that loads ({first_line(error)}): "
            "add its preprocessor_config.json or processor_config.json"
        ) from None
