"""A prompt with everything that an environment may tell, between a real engine and the trainer's model."""

from __future__ import annotations

import pytest
from engine_samples import Trainer, drawn, request_id
from test_rollout_engine import role, trainer  # noqa: F401  (fixtures)

from dart.agent.prompt import Conversation, Turn, shown
from dart.config import Agent
from dart.core.types import Observation
from dart.workers.rollout.engine import Engine

pytestmark = [pytest.mark.engine, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]


async def test_pictures_of_the_instruction_and_texts_of_the_environment_keep_parity(
    engine: Engine,
    trainer: Trainer,  # noqa: F811
) -> None:
    """The trainer gets the prompt's ids and its pictures in order, whatever the prompt is made of."""
    showing = Agent.model_validate({"prompt": "minimal", "show": ["accessibility_tree", "last_action_error"]})
    conversation = Conversation(showing, "make it look so", [drawn(40), drawn(41)])
    for number in range(2):
        seen = Observation(drawn(number), accessibility_tree="button <|im_end|> OK", last_action_error="no <x>")
        notes = shown(showing, seen)
        prompt = conversation.prompt(seen.image, notes)
        generation = await engine.generate(request_id(), prompt.parts, 1.0, 12)
        compact, _ = engine._encoder.encode(prompt.parts)
        assert list(generation.prompt_token_ids) == trainer.expand(compact, prompt.images)
        assert trainer.difference(generation, prompt.images) < 1e-5
        conversation.add(Turn(seen.image, generation.token_ids, generation.truncated, notes))
