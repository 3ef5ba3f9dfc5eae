"""Run in a copy of the tree with the edits of `extensions`: the value of each added loss, as JSON."""

from __future__ import annotations

import json

from loss_samples import arguments

from dart.algo.loss import policy_loss
from dart.config import Loss
from dart.workers.train.passes.settings import loss_recipe

if __name__ == "__main__":
    recipes = {kind: loss_recipe(Loss(kind=kind, kl_coefficient=0.0)) for kind in ("reinforce", "my_losses:reinforce")}
    print(json.dumps({kind: policy_loss(**arguments({"recipe": one})).loss.item() for kind, one in recipes.items()}))
