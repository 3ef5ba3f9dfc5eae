"""The model's layers, computed faster than transformers does: the same values, up to rounding."""
