"""Make a base policy: record demonstrations, build the model, imitate, write it.

    python -m examples.base_policy ladder --out models/ladder

`recipes.py` says what each is taught. All intermediate files are kept in examples/base_policy/work, so a stopped run
continues where it was; it takes about a quarter of an hour for the ladder, and longer for MiniWoB. The desktop's
needs what `make desktop` installs. --measure prints the success of the finished policy on each of its tasks, greedy and
at temperature 1, with 95 % Wilson intervals, on seeds that neither configs nor evaluations use.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from dart.agent.grammar import make_grammar
from dart.config.policy import BUILTIN_MODELS
from dart.core.action import Action, Click, Finish, Point, TypeText
from dart.core.evaluation.estimates import wilson
from examples.base_policy import demos
from examples.base_policy.chat import AGENT, Chat, agent_of
from examples.base_policy.data import Pool
from examples.base_policy.evaluate import success
from examples.base_policy.fast import speed_up
from examples.base_policy.model import build, inherit, load, save
from examples.base_policy.recipes import RECIPES, Recipe
from examples.base_policy.train import Trainer

WORK = Path(__file__).parent / "work"


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    recipe, work = RECIPES[options.name], options.work / options.name
    if options.measure:
        measure(recipe, options.out, options.episodes)
    else:
        make(recipe, work, options.out, options.every)


def make(recipe: Recipe, work: Path, out: Path, every: int) -> None:
    """Write the policy to `out`, and one every `every` steps to `work`."""
    work.mkdir(parents=True, exist_ok=True)
    demos.record(work / "demos", recipe)
    pool = Pool(work / "demos", recipe.taught)
    pool.refresh()
    start = _start(recipe, work)
    model, tokenizer = load(start)
    trainer = Trainer(model, Chat(tokenizer, agent_of(recipe)), pool, recipe)
    state = work / "state.pt"
    if state.exists():
        trainer.load(state)
        print(f"continuing at step {trainer.step}", flush=True)
    for step in trainer.run(every):
        trainer.save(state)
        _write(model, start, work / f"step-{step:05d}")
    trainer.save(state)  # the last step need not be one of every `every`
    _write(model, start, out)
    print(f"{out} is made", flush=True)


def _start(recipe: Recipe, work: Path) -> Path:
    """The folder of the model that the training begins with, made whole or not at all."""
    start, unfinished = work / "start", work / "start.part"
    if not (start / "config.json").exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        build(unfinished, _texts(recipe, work / "instructions.json"))
        if recipe.ancestor:
            inherit(unfinished, BUILTIN_MODELS / recipe.ancestor)
        shutil.rmtree(start, ignore_errors=True)
        unfinished.rename(start)
    return start


def _write(model: Any, start: Path, folder: Path) -> None:
    """The model as it is now, with the tokenizer and the processor of `start`."""
    shutil.copytree(start, folder, dirs_exist_ok=True)
    save(model, folder)


def measure(recipe: Recipe, folder: Path, episodes: int) -> None:
    """Print the success on every task of the policy as it is on disk."""
    model, tokenizer = load(folder)
    speed_up(model)
    model.eval()
    chat = Chat(tokenizer, agent_of(recipe))
    for greedy in (True, False):
        began = time.monotonic()
        rates = success(model, chat, recipe, recipe.tasks, episodes, greedy)
        shown = ", ".join(f"{name} {_percent(round(rate * episodes), episodes)}" for name, rate in rates.items())
        every = _percent(sum(round(rate * episodes) for rate in rates.values()), episodes * len(rates))
        how = "greedy" if greedy else "temperature 1"
        print(f"{how}: {every} ({shown}), {episodes} episodes each, {time.monotonic() - began:.0f} s", flush=True)


def _percent(successes: int, episodes: int) -> str:
    """With the 95 % Wilson interval."""
    least, most = wilson(successes, episodes)
    return f"{100 * successes / episodes:.1f} % ({100 * least:.1f} to {100 * most:.1f})"


def _texts(recipe: Recipe, cache: Path) -> list[str]:
    """The texts that the tokenizer is made from: instructions and every kind of action."""
    if not cache.exists():
        unfinished = cache.with_suffix(".part")
        unfinished.write_text(json.dumps(demos.instructions(recipe)), encoding="utf-8")
        unfinished.rename(cache)
    grammar = make_grammar(AGENT)
    actions: list[Action] = [Click(Point(0.5, 0.5)), TypeText("a"), Finish()]
    return [*json.loads(cache.read_text(encoding="utf-8")), *(grammar.format(a, *recipe.viewport) for a in actions)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES), help="which policy")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the finished policy")
    parser.add_argument("--measure", action="store_true", help="make nothing; print the success of the policy in --out")
    parser.add_argument("--episodes", type=int, default=50, help="with --measure: episodes of each task")
    parser.add_argument("--work", type=Path, default=WORK, help="demonstrations and intermediate policies")
    parser.add_argument("--every", type=int, default=100, help="steps between intermediate policies")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
