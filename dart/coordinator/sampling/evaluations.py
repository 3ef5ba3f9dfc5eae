"""The evaluations of one run, one at a time: a training run makes one before and one after for each decoding, `dart
eval` a single one."""

from __future__ import annotations

from collections.abc import Mapping

from dart.agent.grammar import make_grammar
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.sampling.endpoint import Endpoint, EndpointAlone
from dart.coordinator.sampling.episodes import Writer, sample
from dart.coordinator.sampling.evaluation import Evaluation
from dart.coordinator.service.journal import Journal
from dart.core.curation.orders import Failures
from dart.core.evaluation.documents import ByDecoding, Decoding
from dart.job import Address
from dart.store.database import Database


class Evaluations:
    """`results`: success by label ("before", "after") and decoding. `current`: the evaluation in progress."""

    def __init__(
        self,
        config: Config,
        database: Database,
        envs: EnvPool,
        policy: RolloutPool,
        journal: Journal,
        failures: Failures,
        known: Mapping[str, ByDecoding],
    ) -> None:
        """`known`: the results of an earlier process of the run."""
        self._config, self._database, self._envs, self._policy = config, database, envs, policy
        self._journal, self._failures = journal, failures
        self.results: dict[str, ByDecoding] = {label: {**results} for label, results in known.items()}
        self.current: Evaluation | None = None

    @property
    def finished_episodes(self) -> int:
        """Episodes of the evaluation in progress that are over."""
        return len(self.current.outcomes) if self.current else 0

    async def trained(self, label: str, version: int) -> None:
        """Evaluate the policy that is trained, with each decoding that the config wants and that is not known yet."""
        for decoding in self._config.evaluation.decodings:
            results = self.results.setdefault(label, {})
            if decoding in results:
                continue
            # The name tells the weights, so an evaluation that was cut off continues only with the same ones.
            name = f"{label}-{decoding}-{await self._weights(version)}"
            source = await self._evaluate(name, self._temperature(decoding))
            results[decoding] = success = source.result()
            self._journal.event("evaluation", label=label, decoding=decoding, **success)

    async def _weights(self, version: int) -> str:
        """A name for the weights of this version, which a run that resumed from before it has made more than once."""
        await self._journal.flush(self._database)
        times = await self._database.times_made(version)
        return f"v{version}" if times < 2 else f"v{version}-made-{times}-times"

    async def alone(self, endpoint: Address | None) -> Evaluation:
        """`dart eval`: evaluate the model behind the endpoint, or `config.model`, at `evaluation.temperature`."""
        temperature, samples = self._temperature("sampled"), self._config.evaluation.samples
        if endpoint is None:
            source = await self._evaluate("eval", temperature, samples)
        else:
            limit, as_written = self._config.rollout.max_tokens, make_grammar(self._config.agent).as_written
            async with Endpoint(endpoint, temperature, limit, as_written) as client:
                source = await self._evaluate(
                    "eval", temperature, samples, lambda _: EndpointAlone(client, self._policy.screenshots)
                )
        self._journal.event("evaluation", label="eval", **source.result())
        return source

    def _temperature(self, decoding: Decoding) -> float:
        chosen = self._config.evaluation.temperature
        sampled = self._config.rollout.temperature if chosen is None else chosen
        return sampled if decoding == "sampled" else 0.0

    async def _evaluate(
        self, name: str, temperature: float, samples: int = 1, writer: Writer | None = None
    ) -> Evaluation:
        source = Evaluation(name, self._config, self._database, self._envs, self._failures, temperature, samples)
        self.current = source
        try:
            await source.open()
            await sample(source, self._envs, self._policy, self._config, writer)
            await source.close()
        finally:
            self.current = None
        return source
