"""Make the base policy that ships with dart: build it, record demonstrations, pre-train, stop early, write it.

    python -m examples.base_policy --out dart/assets/tiny-qwen3vl

All intermediate files are kept in examples/base_policy/work, so a stopped run continues where it was. It takes about an
hour on one core. The model first learns to do the tasks, then to do them like an oracle that often errs and tries
again, which leaves reinforcement learning something to improve.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch

from dart.agent.grammar import make_grammar
from dart.config import Environment, TaskSet
from dart.core.action import Action, Click, Finish, Point, TypeText
from examples.base_policy import demos
from examples.base_policy.chat import AGENT, Chat
from examples.base_policy.data import Pool
from examples.base_policy.evaluate import success
from examples.base_policy.fast import speed_up
from examples.base_policy.model import build, load, save
from examples.base_policy.train import Schedule, Trainer

WORK = Path(__file__).parent / "work"
VIEWPORT = (160, 224)  # multiples of patch 16 × merge 2: nothing is resized
TASKS = {  # episodes per training step
    "click-test-2": 6,
    "click-color": 3,
    "click-dialog": 3,
    "focus-text-2": 3,
    "click-button-sequence": 5,
    "enter-text": 4,
}
HELD_OUT = 1_000_000
STEP_LIMIT = 5


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    config = Environment(tasks=TaskSet(names=tuple(TASKS)), viewport=VIEWPORT, slots=options.slots)
    options.work.mkdir(parents=True, exist_ok=True)
    demos.record(options.work / "demos", config, options.episodes)
    pool = Pool(options.work / "demos", TASKS)
    pool.refresh()
    start = options.work / "random"
    if not (start / "config.json").exists():
        build(start, _texts(pool))
    model, tokenizer = load(start)
    chat = Chat(tokenizer)
    trainer = Trainer(
        model, chat, pool, TASKS, Schedule(options.steps), VIEWPORT, options.mistakes, options.mistakes_from
    )
    state = options.work / "state.pt"
    if state.exists():
        trainer.load(state)
        print(f"continuing at step {trainer.step}", flush=True)
    for step in trainer.run(options.every):
        trainer.save(state)
        if step < options.evaluate_from:
            continue
        folder = options.work / f"step-{step:05d}"
        shutil.copytree(start, folder, dirs_exist_ok=True)
        save(model, folder)
        mean = _evaluate(folder, config, options.evaluate)
        if mean >= options.stop_at:
            print(f"success {mean:.2f} has reached {options.stop_at}: {folder} becomes {options.out}", flush=True)
            shutil.copytree(folder, options.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("success.json"))
            return
    print(f"{options.steps} steps are done but success never reached {options.stop_at}: see {options.work}")


def _evaluate(folder: Path, config: Environment, episodes: int) -> float:
    """The success rate of the model as written to disk, in bfloat16."""
    model, tokenizer = load(folder)
    speed_up(model)
    started = time.monotonic()
    per_task = success(model.eval(), Chat(tokenizer), config, range(HELD_OUT, HELD_OUT + episodes), STEP_LIMIT)
    mean = sum(per_task.values()) / len(per_task)
    (folder / "success.json").write_text(
        json.dumps({"mean": mean, "episodes": episodes, "per_task": per_task}, indent=1)
    )
    shown = ", ".join(f"{task} {share:.2f}" for task, share in per_task.items())
    print(f"{folder.name}: success {mean:.3f} ({shown}) in {time.monotonic() - started:.0f} s", flush=True)
    return mean


def _texts(pool: Pool) -> list[str]:
    """The texts that the tokenizer is made from: instructions and every kind of action."""
    grammar = make_grammar(AGENT)
    said = [d.instruction for known in pool.by_task.values() for d in known[:500]]
    actions: list[Action] = [Click(Point(0.5, 0.5)), TypeText("a"), Finish()]
    return [*said, *(grammar.format(action, *VIEWPORT) for action in actions)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the finished checkpoint")
    parser.add_argument("--work", type=Path, default=WORK, help="demonstrations and intermediate checkpoints")
    parser.add_argument("--stop-at", type=float, default=0.25, help="mean held-out success at which it ends")
    parser.add_argument("--episodes", type=int, default=6000, help="demonstrations of each task")
    parser.add_argument(
        "--steps", type=int, default=1700, help="most training steps, at which the learning rate schedule ends"
    )
    parser.add_argument("--every", type=int, default=100, help="steps between saving and evaluating")
    parser.add_argument("--evaluate", type=int, default=20, help="held-out episodes of each task in an evaluation")
    parser.add_argument("--evaluate-from", type=int, default=1700, help="the first step that is evaluated")
    parser.add_argument("--slots", type=int, default=24, help="pages evaluated side by side")
    parser.add_argument("--mistakes", type=float, default=0.45, help="share of demonstrated moves that are wrong")
    parser.add_argument(
        "--mistakes-from", type=int, default=1200, help="the training step from which wrong moves are demonstrated"
    )
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
