"""The equations of step-wise GRPO and its relatives, torch only: one function per equation, and no imports from the
rest of dart.

Tokens are flat everywhere: a batch is the float or integer tensors [T] of its response tokens, one step after the
other, with `Steps` saying which step a token belongs to. There is no padding, so none can enter a mean. Functions keep
the dtype of their input, so each can be checked in float64. They raise ValueError for tensors whose rank, length or
dtype is wrong, and for a clip, cap, quantile, temperature or constant length that is out of range.
"""
