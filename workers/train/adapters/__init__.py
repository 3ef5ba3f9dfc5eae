"""Adapters: small weights beside frozen ones (`trainer.lora`), how they are merged, saved and resumed from."""
