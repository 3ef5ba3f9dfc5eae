"""The policy that all runs of an experiment start from: what it can do, and the gates that say what it must not."""

from __future__ import annotations

from benchmarks.trials import findings, once
from benchmarks.trials.inference import Estimate, estimate
from benchmarks.trials.protocol import Protocol, as_options
from benchmarks.trials.sweep import Plan
from dart.core.evaluation.documents import ByDecoding, Decoding, Success
from dart.errors import UserError


def held_out(plan: Plan, protocol: Protocol, temperature: float) -> Success:
    """Success of the policy that all runs start from, on the held-out instances that the runs are evaluated on.

    Evaluated once, and kept. Raises UserError.
    """
    overrides = (*as_options(protocol.settings), f"evaluation.temperature={temperature:g}")
    return once.evaluate(plan, _label(temperature), [], overrides)["success"]


def has_held_out(plan: Plan, temperature: float) -> bool:
    return (plan.results / f"{_label(temperature)}.json").exists()


def _label(temperature: float) -> str:
    return f"base-at-{temperature:g}"


def temperatures(protocol: Protocol) -> dict[Decoding, float]:
    """Of the two decodings that runs are evaluated with."""
    config = protocol.load_config()
    sampled, greedy = config.evaluation.temperature, 0.0
    return {"sampled": config.rollout.temperature if sampled is None else sampled, "greedy": greedy}


def base_success(plan: Plan, protocol: Protocol) -> ByDecoding:
    return {decoding: held_out(plan, protocol, one) for decoding, one in temperatures(protocol).items()}


def has_base(plan: Plan, protocol: Protocol) -> bool:
    return all(has_held_out(plan, one) for one in temperatures(protocol).values())


def endpoints(success: ByDecoding, protocol: Protocol) -> dict[str, Estimate]:
    """The base policy's success by endpoint, without an interval over runs."""
    every = (*protocol.primary, *protocol.secondary)
    return {one.name: estimate([findings.success(success, one, protocol)]) for one in every}


def check_gates(plan: Plan, protocol: Protocol) -> None:
    """Raises UserError if the base policy can already do what it must not be able to do."""
    if (gates := protocol.gates) is None:
        return
    config = protocol.load_config()
    tasks = protocol.tasks_of(gates.level, config.environment.tasks.names)
    # On training seeds: nobody looks at a held-out one before the runs. So the two ranges change places.
    train, held_out = config.environment.tasks.train_seeds, config.environment.tasks.eval_seeds
    swapped = as_options(
        {
            **protocol.settings,
            "environment.tasks.names": list(tasks),
            "environment.tasks.train_seeds": list(held_out),
            "environment.tasks.eval_seeds": list(train),
        }
    )
    greedy = once.evaluate(
        plan, "gate-greedy", ["--temperature", "0", "--episodes", str(gates.greedy_episodes)], swapped
    )
    if (rate := greedy["success"]["mean"]) > gates.greedy_at_most:
        raise UserError(
            f"gate: the base policy solves {rate:.1%} of the {gates.level} tasks greedily, and at most "
            f"{gates.greedy_at_most:.0%} are allowed: there is too little left to learn, so make another base policy"
        )
    often = once.evaluate(
        plan, "gate-samples", ["--samples", str(gates.samples), "--episodes", str(gates.instances)], swapped
    )
    if (passed := often["pass_at_k"][str(gates.samples)]["mean"]) > gates.pass_at_most:
        raise UserError(
            f"gate: pass@{gates.samples} of the base policy on the {gates.level} tasks is {passed:.1%}, and at most "
            f"{gates.pass_at_most:.0%} are allowed: make another base policy"
        )
