"""dart: asynchronous multi-turn reinforcement learning for agents that operate a computer."""

__version__ = "0.1.0"
