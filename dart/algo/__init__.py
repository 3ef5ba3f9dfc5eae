"""The equations of step-wise GRPO, torch only: one function per equation, imports nothing of ours.

Tokens are flat everywhere: a batch is the float or integer tensors [T] of its response tokens, one step after the
other, with `step_index` [T] saying which step a token belongs to. There is no padding, so none can enter a mean.
"""
