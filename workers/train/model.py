"""Loading a vision-language checkpoint, and the one forward pass that training uses.

The forward pass runs the vision tower once per distinct screenshot of a micro-batch, the text model once per row (a
prompt with all responses sampled from it), and the head at response positions only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.image_processing_utils import BaseImageProcessor

from dart.algo.logprobs import log_distribution, token_entropy, token_logprobs
from dart.errors import UserError
from dart.wire.tokens import vision_token_ids
from dart.workers.train import linear, vision
from dart.workers.train.batch import MicroBatch

HEAD_ELEMENTS = 1 << 26
"""The most logits (tokens × vocabulary) held at once; above it the head runs in chunks, recomputed for the gradient."""


def check_folder(folder: Path) -> None:
    """Raises UserError unless the folder holds a vision-language checkpoint; loads no weights."""
    remedy = "set model.path to a Hugging Face folder of a vision-language model, or to builtin:NAME"
    if not folder.is_dir():
        raise UserError(f"model.path: folder {folder} does not exist: {remedy}")
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json, so it is not a checkpoint: {remedy}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.path: config.json in {folder} cannot be read ({_first_line(error)}): {remedy}"
        ) from None
    if not hasattr(config, "vision_config") or not hasattr(config, "image_token_id"):
        raise UserError(f"model.path: {folder} is a {config.model_type} model, which sees no images: {remedy}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.path: {folder} has no *.safetensors weights: {remedy}")


def load_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """The checkpoint in float32 (master weights), no dropout. Raises UserError if weights and config disagree."""
    check_folder(folder)
    remedy = "the checkpoint is damaged or has another architecture: download or export it again"
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.path: weights in {folder} do not fit its config.json ({_first_line(error)}): {remedy}"
        ) from None
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(str(name) for name in info[problem]):
            what = f"{len(names)} {problem.replace('_', ' ')}, the first is {names[0]}"
            raise UserError(f"model.path: weights in {folder} do not fit its config.json ({what}): {remedy}")
    vision.speed_up(model)
    if device.type == "cpu":
        linear.speed_up(model)
    return model.to(device).eval()


def pairs_per_token(model: PreTrainedModel) -> float:
    """How many pairs of tokens take as many operations in the text model's attention (4 per pair, channel and layer)
    as one token takes in its linear layers (2 per weight)."""
    text = model.config.get_text_config()
    weights = sum(weight.numel() for weight in model.get_decoder().layers.parameters())
    of_head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return float(2 * weights / (4 * text.num_attention_heads * of_head * text.num_hidden_layers))


def load_banned_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that roll-out engines never sample, so that their probability is 0 here as well. Raises UserError."""
    try:
        return vision_token_ids(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {folder} has no tokenizer that loads ({_first_line(error)}): add its tokenizer files"
        ) from None


def load_image_processor(folder: Path) -> BaseImageProcessor:
    """The checkpoint's own image processor. Raises UserError."""
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path: {folder} has no image processor that loads ({_first_line(error)}): "
            "add its preprocessor_config.json or processor_config.json"
        ) from None


def forward(
    model: PreTrainedModel,
    batch: MicroBatch,
    temperature: float,
    banned: torch.Tensor,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π(a_t) and entropy H_t of every response token, each float32 [T].

    Gradients flow through the first; through the second only if asked for, since that keeps another [T, V].
    """
    inputs: dict[str, object] = {}
    if batch.pixel_values is not None:
        images = model.model.get_image_features(batch.pixel_values, batch.image_grid_thw, return_dict=True)
        images.pooler_output = tuple(images.pooler_output[i] for i in batch.image_index)
        if getattr(images, "deepstack_features", None) is not None:
            images.deepstack_features = [
                tuple(level[i] for i in batch.image_index) for level in images.deepstack_features
            ]
        inputs["mm_encoder_outputs"] = {"image": images}
    hidden = model.model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        **inputs,
    ).last_hidden_state
    hidden = hidden.flatten(0, 1).index_select(0, batch.predict_index)
    return _head(model.lm_head, hidden, batch.token_ids, temperature, banned, entropy_gradient)


def _head(
    lm_head: torch.nn.Linear,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    banned: torch.Tensor,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    def run(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Bfloat16 logits would put the log-probabilities off by 0.006 on average and 0.034 at most, and so every ratio.
        with torch.autocast(rows.device.type, enabled=False):
            logits = lm_head(rows.to(lm_head.weight.dtype))
        distribution = log_distribution(logits, temperature, banned)
        return token_logprobs(distribution, ids), token_entropy(distribution, gradient=entropy_gradient)

    size = max(1, HEAD_ELEMENTS // lm_head.weight.shape[0])
    if hidden.shape[0] <= size:
        return run(hidden, token_ids)
    parts = [
        checkpoint(run, rows, ids, use_reentrant=False)
        for rows, ids in zip(hidden.split(size), token_ids.split(size), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
