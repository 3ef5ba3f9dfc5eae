"""High-entropy step selection where thoughts decide: `python -m benchmarks.learning.entropy`.

The ladder's policies write no thoughts, so there a step's entropy says which action it is. Here every step is a thought
and an action of 50 to 70 tokens from a template. At most steps nothing is open ("so I go on with Next"); at two of six
the thought names one of three letters, and that token decides: a roll-out succeeds if both letters are the hidden ones,
which are the same for all tasks of a seed, so that there is something to learn from every batch.

Real: the tiny model, the trainer's own forward, selection, loss and backward (`dart.workers.train`). Made up: the task
and its rewards. There is no world, no engine and no learning: the tiny model first imitates the template with random
letters; then batches of groups of eight are sampled from it, and the gradient of each *saved* batch is computed three
times at the same weights: of all steps, of those that the selection keeps, and of as many taken at random. Compared,
over the batches of a seed: the gradient's variance over its squared mean (noise over signal). What the selection is for
is to leave steps out that teach nothing, so it should cost less signal than leaving out as many at random, and no more
than leaving out none. Beside it stands which part of the push on tokens, |A| (1 - probability), goes to tokens that
decide; it is larger with the selection by the task's design, because those steps have the highest entropies, so it is
not tested. A seed is one observation; t-intervals over seeds, paired. Seeds without a signal above the noise have no
ratio; they are left out of its comparison, and counted.

It needs torch and the CPU alone: a quarter of an hour on two cores. Writes
results/learning/entropy.json.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.trials import sweep
from benchmarks.trials.inference import Comparison, compare
from dart.algo.logprobs import log_distribution, token_entropy, token_logprobs
from dart.algo.selection import high_entropy_steps
from dart.config import Model, TrainWorkerConfig
from dart.core.curation.advantage import group_advantages
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.workers.train.model import load_banned_tokens, load_model
from dart.workers.train.trainer import Trainer

MODEL = "builtin:tiny-qwen3vl"
QUANTILE = 0.2
SELECTED, RANDOM, ALL = "selected", "as many at random", "all"
STEPS, DECISIONS, ROLLOUTS, GROUPS = 6, (2, 4), 8, 4
LETTERS = "abc"
BYTES, END, START = 8, 2, 1
"""Of the tiny model's tokenizer: the id of byte 0, the end of a turn, its start."""
ROUTINE = "Thought: no letter is asked for here, so I go on with Next.\nAction: next"
DECIDE = "Thought: of the three letters I want {0} at this point.\nAction: pick {0}"
MOST_IMITATION, LOOK_EVERY, FAITHFUL, LEAST_FAITHFUL = 600, 25, 0.95, 0.8
"""Imitation ends when this share of sampled steps is in the template's words, or after so many updates. A policy below
the last of these succeeds too rarely for batches to be made of it."""
MOST_GROUPS = 100
"""So many groups are sampled for a batch, at most."""


@dataclass(frozen=True, slots=True)
class Step:
    """A sampled step. `decides`: the position of the token that decides, if there is one. `entropy`: its mean, nats."""

    task: int
    place: int
    rollout: int
    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    entropy: float
    decides: int | None
    advantage: float = 0.0


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of the batches of one seed. `noise`: total variance over batches, divided by the squared norm of the mean. The
    rest are shares: of steps that trained, of deciding steps that did, and of the push that went to decisions."""

    noise: float
    kept_steps: float
    kept_deciding_steps: float
    push_on_decisions: float


def tokens(text: str) -> list[int]:
    return [BYTES + byte for byte in text.encode()]


def prompt(task: int, place: int) -> list[int]:
    """All prompts have the same length, so that a batch needs no padding."""
    return [START, *tokens(f"task {task:04d} step {place}"), END, START]


def template(place: int, letter: str) -> str:
    return DECIDE.format(letter) if place in DECISIONS else ROUTINE


def decision(place: int) -> int | None:
    """Where the token is that decides; the letter in the action only repeats it."""
    return len(tokens(DECIDE.partition("{0}")[0])) if place in DECISIONS else None


# ---- the policy ----


def trainer(folder: str, quantile: float, *, imitates: bool = False) -> Trainer:
    loss = {"kl_coefficient": 0.0, "entropy_quantile": quantile, "importance": "none"}
    loss |= {"kind": "likelihood"} if imitates else {}
    return Trainer(
        TrainWorkerConfig.model_validate(
            {
                "model": {"path": folder, "dtype": "float32"},
                "trainer": {"learning_rate": 1e-3, "weight_decay": 0.0, "gradient_clip": 1.0 if imitates else 1e9,
                            "microbatch_tokens": 8192, "loss": loss},
                "sync": {"transport": "gloo"}, "seed": 0, "temperature": 1.0, "total_updates": None,
            }
        )
    )  # fmt: skip


def imitate(source: str, target: Path, rng: random.Random, most: int = MOST_IMITATION) -> float:
    """Train the template into the model, with random letters, and save it. Returns how faithful it is.

    Raises UserError if it is not faithful enough to be measured.
    """
    learner, faithful = trainer(source, 0.0, imitates=True), 0.0
    for number in range(1, most + 1):
        chosen = [(rng.randrange(10_000), place, rng.choice(LETTERS)) for _ in range(8) for place in range(STEPS)]
        update(learner, [message(shown(*one)) for one in chosen])
        if number % LOOK_EVERY == 0 or number == most:
            faithful = faithfulness(learner.model, rng)
            if faithful >= FAITHFUL:
                break
    if faithful < LEAST_FAITHFUL:
        raise UserError(
            f"after {most} updates of imitation {faithful:.0%} of the steps are in the template's words, and "
            f"{LEAST_FAITHFUL:.0%} are needed: raise MOST_IMITATION"
        )
    learner.save_checkpoint(target)
    return faithful


def shown(task: int, place: int, letter: str) -> Step:
    """A step to imitate."""
    return Step(task, place, 0, prompt(task, place), [*tokens(template(place, letter)), END], [], 0.0, None, 1.0)


def faithfulness(model: torch.nn.Module, rng: random.Random) -> float:
    """The share of sampled steps that are in the template's words."""
    asked = [(rng.randrange(10_000), place) for _ in range(8) for place in range(STEPS)]
    sampled = sample(model, asked, [0] * len(asked))
    words = [{tuple([*tokens(template(place, one)), END]) for one in LETTERS} for _, place in asked]
    return sum(tuple(step.response) in known for step, known in zip(sampled, words, strict=True)) / len(asked)


@functools.cache
def banned() -> list[int]:
    """The vision tokens, which engines never sample, so that the trainer refuses them."""
    return list(load_banned_tokens(Model(path=MODEL).folder))


@torch.no_grad()
def sample(model: torch.nn.Module, asked: Sequence[tuple[int, int]], rollouts: Sequence[int]) -> list[Step]:
    """Responses of the policy to (task, place), at temperature 1, with log-probabilities and entropies."""
    prompts = [prompt(task, place) for task, place in asked]
    ids = torch.tensor(prompts)
    most = max(len(tokens(ROUTINE)), len(tokens(DECIDE))) + 8
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=most, eos_token_id=END, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        suppress_tokens=banned(),
    )  # fmt: skip
    logits = torch.stack(made.logits, dim=1)
    steps = []
    for row, (task, place) in enumerate(asked):
        response = made.sequences[row, ids.shape[1] :].tolist()
        response = response[: response.index(END) + 1] if END in response else response
        logs = log_distribution(logits[row, : len(response)], 1.0, torch.tensor(banned()))
        chosen = token_logprobs(logs, torch.tensor(response)).tolist()
        entropy = float(token_entropy(logs).mean())
        steps.append(Step(task, place, rollouts[row], prompts[row], response, chosen, entropy, decision(place)))
    return steps


# ---- batches ----


def batch(model: torch.nn.Module, rng: random.Random, right: Mapping[int, str], groups: int = GROUPS) -> list[Step]:
    """Steps of groups whose roll-outs differ, with the advantages of `advantage.level: step`. right: place → letter.

    Raises UserError if too few groups do.
    """
    made: list[Step] = []
    for _ in range(MOST_GROUPS):
        if len({step.task for step in made}) == groups:
            return made
        task = rng.randrange(10_000)
        asked = [(task, place) for _ in range(ROLLOUTS) for place in range(STEPS)]
        steps = sample(model, asked, [rollout for rollout in range(ROLLOUTS) for _ in range(STEPS)])
        rewards = [float(all(succeeds(step, right) for step in steps if step.rollout == r)) for r in range(ROLLOUTS)]
        if len(set(rewards)) == 1 or task in {step.task for step in made}:
            continue
        advantages = group_advantages(rewards, [STEPS] * ROLLOUTS, level="step", std_normalise=True)
        made += [Step(**{**asdict(step), "advantage": advantages[step.rollout]}) for step in steps]
    raise UserError(f"of {MOST_GROUPS} groups fewer than {groups} have roll-outs that differ: it does not explore")


def succeeds(step: Step, right: Mapping[int, str]) -> bool:
    return step.place not in DECISIONS or step.response == [*tokens(template(step.place, right[step.place])), END]


def message(step: Step) -> pb.Sample:
    length = len(step.response)
    return pb.Sample(
        trajectory_id=f"{step.task}-{step.rollout}",
        group_id=str(step.task),
        advantage=step.advantage,
        prompt_token_ids=step.prompt,
        token_ids=step.response,
        logprobs=step.logprobs or [-1.0] * length,
        versions=[tpb.VersionSpan(version=0, start=0, end=length)],
    )


# ---- gradients ----


def update(learner: Trainer, samples: Sequence[pb.Sample]) -> dict[str, float]:
    return learner.update(samples, len(samples), sum(len(one.token_ids) for one in samples))


def gradient(learner: Trainer, steps: Sequence[Step]) -> tuple[torch.Tensor, float]:
    """The update's whole gradient as one vector, and the share of `steps` that trained; the weights are put back."""
    before = [parameter.detach().clone() for parameter in learner.parameters]
    seen: list[torch.Tensor] = []

    def look(*_: object) -> None:
        seen.append(torch.cat([parameter.grad.flatten().clone() for parameter in learner.parameters]))

    hook = learner.optimizer.register_step_pre_hook(look)
    try:
        metrics = update(learner, [message(step) for step in steps])
    finally:
        hook.remove()
    with torch.no_grad():
        for parameter, old in zip(learner.parameters, before, strict=True):
            parameter.copy_(old)
    learner.optimizer.state.clear()
    (whole,) = seen
    return whole, metrics.get("selected_share", 1.0)


def selected(steps: Sequence[Step], quantile: float) -> list[Step]:
    """Those that the trainer's selection keeps."""
    groups: dict[int, int] = {}
    index = torch.tensor([groups.setdefault(step.task, len(groups)) for step in steps])
    kept = high_entropy_steps(torch.tensor([step.entropy for step in steps], dtype=torch.float64), index, quantile)
    return [step for step, stays in zip(steps, kept.tolist(), strict=True) if stays]


def noise(gradients: Sequence[torch.Tensor]) -> float:
    """Total variance over batches divided by the squared norm of the mean, which is corrected for its own variance."""
    stacked = torch.stack(list(gradients)).double()
    variance = float(stacked.var(dim=0, unbiased=True).sum())
    signal = float(stacked.mean(dim=0).square().sum()) - variance / len(gradients)
    return variance / signal if signal > 0 else math.inf


def push(steps: Sequence[Step]) -> tuple[float, float]:
    """How hard the tokens that decide, and all tokens, are pushed: |A| (1 - probability), averaged within each step."""
    deciding = every = 0.0
    for step in steps:
        each = [abs(step.advantage) * (1 - math.exp(one)) / len(step.logprobs) for one in step.logprobs]
        every += sum(each)
        if step.decides is not None and step.decides < len(each):
            deciding += each[step.decides]
    return deciding, every


def measured(folder: str, saved: Sequence[Sequence[Step]], rng: random.Random) -> dict[str, Gradients]:
    """The gradients of the saved batches: as the trainer selects, of as many steps at random, and of all.

    The trainer itself selects, so that what is compared is what it does; `selected` says which steps these are.
    """
    kept = [selected(steps, QUANTILE) for steps in saved]
    by_chance = [rng.sample(list(steps), len(those)) for steps, those in zip(saved, kept, strict=True)]
    selecting, plain = trainer(folder, QUANTILE), trainer(folder, 0.0)
    return {
        SELECTED: _measured([gradient(selecting, steps)[0] for steps in saved], kept, saved),
        RANDOM: _measured([gradient(plain, steps)[0] for steps in by_chance], by_chance, saved),
        ALL: _measured([gradient(plain, steps)[0] for steps in saved], saved, saved),
    }


def _measured(
    gradients: Sequence[torch.Tensor], kept: Sequence[Sequence[Step]], saved: Sequence[Sequence[Step]]
) -> Gradients:
    deciding, every = (sum(one) for one in zip(*(push(steps) for steps in kept), strict=True))
    return Gradients(
        noise(gradients),
        sum(map(len, kept)) / sum(map(len, saved)),
        sum(map(_deciding, kept)) / sum(map(_deciding, saved)),
        deciding / every,
    )


def _deciding(steps: Sequence[Step]) -> int:
    return sum(step.decides is not None for step in steps)


def with_signal(rows: Sequence[Mapping[str, Gradients]]) -> dict[int, Mapping[str, Gradients]]:
    """The seeds whose mean gradients are all above their own noise; elsewhere noise over signal is infinite."""
    return {seed: row for seed, row in enumerate(rows) if all(math.isfinite(one.noise) for one in row.values())}


def compared(rows: Sequence[Mapping[str, Gradients]]) -> dict[str, Comparison | None]:
    """The logarithm of noise over signal with selection, minus that of the others; paired by seed."""
    logs = {
        name: {seed: math.log(row[name].noise) for seed, row in with_signal(rows).items()}
        for name in (SELECTED, RANDOM, ALL)
    }
    return {other: compare(logs[SELECTED], logs[other]) for other in (RANDOM, ALL)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=16, help="saved batches for each seed")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments/learning/entropy"), help="for the policies")
    options = parser.parse_args()
    try:
        run(options.seeds, options.batches, options.out)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def run(seeds: int, batches: int, out: Path) -> None:
    rows, faithful = [], []
    for seed in range(seeds):
        rng, began = random.Random(seed), time.monotonic()
        torch.manual_seed(seed)
        folder = out / f"policy-{seed}-{time.time_ns()}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        faithful.append(imitate(MODEL, folder, rng))
        policy = load_model(folder, torch.device("cpu"))
        right = {place: rng.choice(LETTERS) for place in DECISIONS}
        saved = [batch(policy, rng, right) for _ in range(batches)]
        rows.append(measured(str(folder), saved, rng))
        print(f"seed {seed}: {faithful[-1]:.0%} in the template's words, {time.monotonic() - began:.0f} s", flush=True)
        for name, one in rows[-1].items():
            print(f"  {name}: {one}", flush=True)
    found, left_out = compared(rows), len(rows) - len(with_signal(rows))
    for other, difference in found.items():
        print(f"log of noise over signal, {SELECTED} minus {other}: {difference}")
    print(f"left out of the comparisons: {left_out} of {len(rows)} seeds, whose signal is lost in the noise")
    results = {
        "quantile": QUANTILE, "batches": batches, "groups": GROUPS, "rollouts": ROLLOUTS, "faithful": faithful,
        "seeds_without_signal": left_out,
        "seeds": [{name: asdict(one) for name, one in row.items()} for row in rows],
        "log_noise_selected_minus": {other: None if one is None else asdict(one) for other, one in found.items()},
    }  # fmt: skip
    what = "real: the tiny model and the trainer on this machine's CPU; the task and its rewards are made up"
    print(sweep.write("learning/entropy", Path(MODEL), results, what))


if __name__ == "__main__":
    main()
