"""The policy that all runs of an experiment start from: what it can do, and the gates that say what it must not."""

from __future__ import annotations

from benchmarks.trials import findings, sweep
from benchmarks.trials.findings import ArmRow
from benchmarks.trials.inference import estimate
from benchmarks.trials.protocol import Protocol, as_options
from benchmarks.trials.sweep import Plan
from dart.core.evaluation.documents import ByDecoding
from dart.errors import UserError


def base_success(plan: Plan, protocol: Protocol) -> ByDecoding:
    """Held-out success of the policy that all runs start from, on the instances that the runs are evaluated on."""
    config = protocol.load_config()
    temperatures = {"sampled": config.rollout.temperature, "greedy": 0.0}
    return {
        decoding: sweep.evaluate(plan, f"base-{decoding}", [], _at(protocol, temperatures[decoding]))["success"]
        for decoding in config.evaluation.decodings
    }


def has_base(plan: Plan) -> bool:
    return all((plan.results / f"base-{decoding}.json").exists() for decoding in ("sampled", "greedy"))


def _at(protocol: Protocol, temperature: float) -> tuple[str, ...]:
    return (*as_options(protocol.settings), f"evaluation.temperature={temperature:g}")


def base_row(success: ByDecoding, protocol: Protocol) -> ArmRow:
    """The base policy as a row of the table: no runs, and success without an interval over runs."""
    endpoints = {
        one.name: estimate([findings.success(success, one, protocol)])
        for one in (*protocol.primary, *protocol.secondary)
    }
    nothing = estimate([0.0])
    return ArmRow("(base policy)", 0, endpoints, *[nothing] * 6)


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
    greedy = sweep.evaluate(
        plan, "gate-greedy", ["--temperature", "0", "--episodes", str(gates.greedy_episodes)], swapped
    )
    if (rate := greedy["success"]["mean"]) > gates.greedy_at_most:
        raise UserError(
            f"gate: the base policy solves {rate:.1%} of the {gates.level} tasks greedily, and at most "
            f"{gates.greedy_at_most:.0%} are allowed: there is too little left to learn, so make another base policy"
        )
    often = sweep.evaluate(
        plan, "gate-samples", ["--samples", str(gates.samples), "--episodes", str(gates.instances)], swapped
    )
    if (passed := often["pass_at_k"][str(gates.samples)]["mean"]) > 0:
        raise UserError(
            f"gate: pass@{gates.samples} of the base policy on the {gates.level} tasks is {passed:.1%}, not 0: make "
            "another base policy"
        )
