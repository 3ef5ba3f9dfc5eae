"""Workers without machines: they take the coordinator's commands and answer each after the time that `timings` gives.

A simulated worker is admitted to the fleet like a real one, and replaces its stream's queue: a command that the
coordinator sends arrives at `put`, and the answer goes to `Fleet.receive`, as protobuf messages both ways.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.simulation.timings import Timings, success_rate
from dart import manifest
from dart.coordinator.fleet.sessions import Fleet
from dart.core.types import Image
from dart.v1 import image_pb2, weights_pb2
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import RESCORE
from dart.wire.convert import image_to_proto
from dart.wire.session import assignment_of

_SCREEN = image_to_proto(Image.of(b"a screenshot", "image/png", 1920, 1080))
_TEXT = "Thought: the next thing to click is here\nAction: click(start_box='(960,540)')"
_TOKENS = list(range(200, 224))
"""The number of tokens in an answer and in a prompt: fewer than in a real run, because the timings have the cost."""


_GENERATED = pb.SessionRequest(
    generated=pb.Generated(
        prompt_token_ids=_TOKENS,
        token_ids=_TOKENS,
        logprobs=[-0.5] * len(_TOKENS),
        text=_TEXT,
        versions=[{"version": 0, "start": 0, "end": len(_TOKENS)}],
        finish_reason=pb.FINISH_REASON_STOP,
    )
)


class Connects(Protocol):
    def connect(self, worker: SimulatedWorker, hello: pb.Hello, ready: pb.Ready) -> Callable[[pb.SessionRequest], None]:
        """Admit the worker; returns the function that it calls with its answers."""


class SimulatedWorker:
    """`fleet` may also be a `Connects`, which sits between the worker and its fleet."""

    role: pb.Role
    capabilities: Sequence[str] = (RESCORE,)
    shares_blobs = True
    """Screenshots need not be sent to it (`Ready.shares_blobs`)."""

    def __init__(self, fleet: Fleet | Connects, name: str, slots: int, **ready: Any) -> None:
        hello = pb.Hello(worker_id=name, instance_id=name, role=self.role, world_size=1, capabilities=self.capabilities)
        self._loop = asyncio.get_running_loop()
        self._reply: Callable[[pb.SessionRequest], None]
        message = pb.Ready(slots=slots, shares_blobs=self.shares_blobs, **ready)
        if isinstance(fleet, Fleet):
            self._admit(fleet, hello, message)
        else:
            self._reply = fleet.connect(self, hello, message)

    def _admit(self, fleet: Fleet, hello: pb.Hello, ready: pb.Ready) -> None:
        self._fleet = fleet
        self.worker, _ = fleet.admit(hello)
        self.worker.end.outbox = self
        self._reply = partial(fleet.receive, self.worker)
        fleet.became_ready(self.worker, ready)
        self.said_ready()

    def put(self, message: pb.SessionResponse, rest: Sequence[bytes] = (), /) -> None:
        # It lives as long as the simulation, so heartbeats would only cost a timer per worker and second.
        kind = message.WhichOneof("body")
        if kind == "bye":
            self.worker.said_goodbye = True
            self._fleet.lose(self.worker, "goodbye")
        else:
            self.carry_out(message)

    def forget(self) -> None:
        """The coordinator has given up this worker: start afresh, with nothing in progress."""

    def said_ready(self) -> None:
        """A Ready is on its way, on this stream. The constructor may not have ended yet."""

    def carry_out(self, message: pb.SessionResponse) -> None:
        """Begin a command; its answer comes by `send`."""
        kind = message.WhichOneof("body")
        if handler := getattr(self, kind or "", None):
            handler(getattr(message, kind))

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        """Answer a command, `seconds` from now, with the one message that `reply` names."""
        (name, body), *_ = reply.items()
        self.send(pb.SessionRequest(**{name: body}), command, seconds)

    def send(self, message: pb.SessionRequest, command: Any, seconds: float) -> None:
        """Like `answer`, with a complete message."""
        getattr(message, message.WhichOneof("body")).assignment.CopyFrom(command.assignment)
        if seconds:
            self._loop.call_later(seconds, self._reply, message)
        else:
            self._loop.call_soon(self._reply, message)


class SimulatedEnvs(SimulatedWorker):
    """Desktops. An episode's outcome is drawn when it begins, from its task's success rate; `names`: all tasks."""

    role = pb.ROLE_ENV

    def __init__(
        self, fleet: Fleet | Connects, name: str, slots: int, timings: Timings, names: list[str], seed: int
    ) -> None:
        self._timings, self._chance = timings, random.Random(f"{name}/{seed}")
        self._rates = {task: success_rate(number, len(names)) for number, task in enumerate(names)}
        self._episodes: dict[str, tuple[int, bool]] = {}
        """The steps left in each episode, and whether it ends in success."""
        super().__init__(fleet, name, slots)

    def forget(self) -> None:
        self._episodes.clear()

    def screenshot(self) -> image_pb2.Image:
        return _SCREEN

    def reset(self, command: pb.Reset) -> None:
        success = self._chance.random() < self._rates[command.task.name]
        steps = self._timings.lengths.sample(self._chance, success)
        self._episodes[command.assignment.assignment_id] = steps, success
        observed = pb.Observed(image=self.screenshot(), instruction=f"do {command.task.name}")
        self.answer(command, self._timings.env.reset(self._chance), observed=observed)

    def act(self, command: pb.Act) -> None:
        name = command.assignment.assignment_id
        steps, success = self._episodes[name]
        self._episodes[name] = steps - 1, success
        done = steps == 1 or command.last
        seconds = self._timings.env.act(self._chance, done)
        if self._chance.random() < self._timings.failures_per_step:
            failure = pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="the desktop does not answer")
            self.answer(command, seconds, failure=failure)
            return
        message = pb.SessionRequest()
        message.observed.image.CopyFrom(self.screenshot())
        message.observed.done, message.observed.reward = done, float(success and steps == 1)
        self.send(message, command, seconds)

    def release(self, command: pb.Release) -> None:
        self._episodes.pop(command.assignment.assignment_id, None)
        self.answer(command, 0.0, released=pb.Released())


class SimulatedReplica(SimulatedWorker):
    """An engine that all its requests share: each pass serves all of them, and takes longer the more there are.

    A request of n passes is done when n passes have been made since it arrived. `_passes` counts them.
    """

    role = pb.ROLE_ROLLOUT
    image_cache_entries = 4096

    def __init__(self, fleet: Fleet | Connects, name: str, timings: Timings, seed: int, version: int = 0) -> None:
        self._timings, self._chance = timings, random.Random(f"{name}/{seed}")
        self._line: list[tuple[float, int, pb.Generate]] = []
        self._numbers = itertools.count()
        self._passes, self._at = 0.0, asyncio.get_running_loop().time()
        self._timer: asyncio.TimerHandle | None = None
        self._version = version
        self._load: Callable[[], None] | None = None
        super().__init__(
            fleet,
            name,
            timings.replica.slots,
            image_cache_entries=self.image_cache_entries,
            engine_ranks=1,
            weight_version=version,
        )

    def forget(self) -> None:
        self._line.clear()
        self._load = None
        self._set_timer()

    def generate(self, command: pb.Generate) -> None:
        self._go_by()
        work = self._timings.replica.work(self._chance)
        heapq.heappush(self._line, (self._passes + work, next(self._numbers), command))
        self._set_timer()

    def load_weights(self, command: pb.LoadWeights) -> None:
        """Once its requests have ended (`drain`), stop for the transfer."""

        def load() -> None:
            self._load, self._version = None, command.version
            loaded = pb.WeightsLoaded(
                version=command.version,
                pause_seconds=self._timings.sync.seconds,
                bytes=int(self._timings.sync.gigabytes * 1e9),
            )
            self.answer(command, self._timings.sync.seconds, weights_loaded=loaded)

        self._load = load
        if not self._line:
            load()

    def _go_by(self) -> None:
        """Count the passes since the last call."""
        now = self._loop.time()
        if self._line:
            self._passes += (now - self._at) / self._timings.replica.seconds_per_pass(len(self._line))
        self._at = now

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._line:
            left = max(0.0, self._line[0][0] - self._passes)
            seconds = left * self._timings.replica.seconds_per_pass(len(self._line))
            self._timer = self._loop.call_later(seconds, self._first_done)

    def _first_done(self) -> None:
        self._timer = None
        self._go_by()
        _, _, command = heapq.heappop(self._line)
        message = pb.SessionRequest()
        message.CopyFrom(_GENERATED)
        message.generated.versions[0].version = self._version
        if command.HasField("forced_text"):
            message.generated.text = command.forced_text
            del message.generated.logprobs[:]
        self.send(message, command, 0.0)
        if self._load and not self._line:
            self._load()
        self._set_timer()


class SimulatedTrainer(SimulatedWorker):
    role = pb.ROLE_TRAIN

    def __init__(self, fleet: Fleet | Connects, timings: Timings, version: int = 0) -> None:
        self._timings = timings
        self._version = version
        self._links = [0.0] * timings.sync.at_once
        """When each link will have finished sending weights, earliest first."""
        self.saving_seconds = 60.0
        self._taken: set[tuple[str, int, int, int]] = set()
        super().__init__(fleet, "train", 1, transfer_host="127.0.0.1")

    def put(self, message: pb.SessionResponse, rest: Sequence[bytes] = (), /) -> None:
        """A command that comes again reminds of one that is under way (`Boundary`): nothing is done twice."""
        if (assignment := assignment_of(message)) is not None:
            page = message.train_batch.page  # 0 in every other command
            taken = (assignment.assignment_id, assignment.attempt, assignment.sequence, page)
            if taken in self._taken:
                return
            self._taken.add(taken)
        super().put(message, rest)

    def train_batch(self, command: pb.TrainBatch) -> None:
        if command.page + 1 < command.pages:
            return
        self._version += 1
        seconds = self._timings.trainer.update(command.total_samples)
        tensors = [weights_pb2.TensorInfo(name="w", shape=[1], dtype="bfloat16")]
        trained = pb.Trained(
            update=command.update, weight_version=self._version, seconds=seconds, tensors=tensors, metrics={"loss": 0.0}
        )
        self.answer(command, seconds, trained=trained)

    def send_weights(self, command: pb.SendWeights) -> None:
        sync = self._timings.sync
        now = self._loop.time()
        ends = max(now, self._links[0]) + sync.seconds
        heapq.heapreplace(self._links, ends)
        sent = pb.WeightsSent(version=command.version, seconds=sync.seconds, bytes=int(sync.gigabytes * 1e9))
        self.answer(command, ends - now, weights_sent=sent)

    def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
        with manifest.written(Path(command.path)) as folder:
            (folder / "weights").write_text(str(self._version), encoding="utf-8")
        self.answer(
            command,
            self.saving_seconds,
            checkpoint_saved=pb.CheckpointSaved(path=command.path, weight_version=self._version),
        )
