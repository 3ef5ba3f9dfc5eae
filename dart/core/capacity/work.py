"""How many floating-point operations a forward pass and an update take, and how long that is.

A product of [a, b] and [b, c] is 2·a·b·c operations; everything that is not a matrix product is left out. The backward
pass of a product is two products of the same size, one for its input and one for its weights, so it takes twice the
forward pass (Kaplan et al., arXiv 2001.08361, section 2.1; PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

from dart.core.capacity.shape import Shape, Text, Vision


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass goes over. `pairs`: of a token with itself and each that it sees, over all rows (`causal_pairs`)."""

    tokens: int
    pairs: int
    responses: int
    """Tokens at which the head runs."""
    screenshots: int
    patches: int
    """Patches of each screenshot, before merging."""

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.responses + other.responses,
            self.screenshots + other.screenshots,
            max(self.patches, other.patches),
        )


def causal_pairs(length: int) -> int:
    """L·(L + 1) / 2 for a row of L tokens: each sees itself and those before it."""
    return length * (length + 1) // 2


def of_text(text: Text, load: Load) -> float:
    """Layers: 2·(matrices of a layer)·layers for each token, and 4·n·d·layers for each pair (2 for q·k, 2 for the
    value). Head: 2·H·V for each response token."""
    layers = text.layers * (2 * text.layer_matrices * load.tokens + 4 * text.heads * text.head_size * load.pairs)
    return float(layers + 2 * text.embedding * load.responses)


def of_vision(vision: Vision, load: Load) -> float:
    """For each patch 2·(patch embedding + blocks), for each merged token 2·(mergers), and for each pair of patches
    that see each other 4·h: all p² of a screenshot in a full block, p·window in a block with windows."""
    matrices = vision.patch_values * vision.hidden + vision.depth * vision.block_matrices
    mergers = (1 + vision.deepstack) * vision.merger_matrices / vision.merge**2
    return load.screenshots * load.patches * (2 * matrices + 2 * mergers) + _vision_pairs(vision, load)


def _vision_pairs(vision: Vision, load: Load) -> float:
    seen = vision.full_blocks * load.patches + (vision.depth - vision.full_blocks) * vision.window
    return float(load.screenshots * load.patches * 4 * vision.hidden * seen)


def forward(shape: Shape, load: Load) -> float:
    return of_text(shape.text, load) + of_vision(shape.vision, load)


@dataclass(frozen=True, slots=True)
class Passes:
    """What an update does with its batch."""

    score: bool
    """A forward pass over everything before the first step: for selection by entropy, or several minibatches."""
    reference: bool
    """A forward pass of the reference model over what trains."""
    trained_share: float = 1.0
    """The share of the rows' work that is left after selection."""
    recompute: bool = False
    """Gradient checkpointing: each layer's forward pass is repeated in the backward pass."""
    vision_trains: bool = True
    """False (a frozen tower): no backward pass through it, and no recomputation."""
    weights_train: bool = True
    """False (an adapter trains): the backward pass has no product for the gradient of a weight. Those of the adapter,
    a thousandth of them, are left out."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of an update. `model`: those that the algorithm asks for, of which MFU is the share (PaLM, appendix
    B); `recomputed`: those that gradient checkpointing repeats, which take time and do not count in MFU."""

    model: float
    recomputed: float

    @property
    def total(self) -> float:
        return self.model + self.recomputed


def update(shape: Shape, load: Load, passes: Passes) -> Work:
    """Forward passes: one to score, one of the reference, one to train; and the backward pass of the last of them."""
    share = passes.trained_share
    forwards = passes.score + passes.reference * share + share
    back = backward(shape, load, passes)
    return Work(forwards * forward(shape, load) + share * back.model, share * back.recomputed)


def backward(shape: Shape, load: Load, passes: Passes) -> Work:
    """Twice the forward pass, of what trains. passes: which part that is, and whether layers are recomputed.

    Head and log-softmax are recomputed too where their logits do not fit a chunk; that is left out. With a frozen
    tower, the operations for the gradient of the decoder's input remain.
    """
    text, vision = of_text(shape.text, load), of_vision(shape.vision, load) * passes.vision_trains
    model = 2 * (text + vision)
    if not passes.weights_train:
        pairs = 4 * shape.text.heads * shape.text.head_size * shape.text.layers * load.pairs
        model -= text - pairs + vision - _vision_pairs(shape.vision, load) * passes.vision_trains
    layers = text - 2 * shape.text.embedding * load.responses
    return Work(model, layers + vision if passes.recompute else 0.0)


def seconds(operations: float, gpus: int, peak: float, utilisation: float) -> float:
    """operations / (gpus · peak · utilisation). peak: operations per second of one GPU; utilisation: the share of it
    that is reached, recomputation included (hardware utilisation, HFU)."""
    return operations / (gpus * peak * utilisation)


PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Words of a card's name, the more exact ones first → dense bfloat16 operations per second (NVIDIA's data sheets)."""


def peak_of(card: str) -> float | None:
    """The peak of the card that nvidia-smi calls by this name; None if it is not in the list."""
    words = set(card.replace("-", " ").split())  # NVIDIA A100-SXM4-80GB
    for name, peak in PEAKS.items():
        if set(name.split()) <= words:
            return peak
    return None
