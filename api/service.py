"""What the routes share: the engine, the tokenizer and the names of a model that is ready, and whether it may be used.

Knows nothing of routes or of sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pageframe.api.auth import Access
from pageframe.api.body import BodyReader
from pageframe.api.config import ServerConfig
from pageframe.api.errors import ApiError, engine_dead, queue_full, shutting_down, unavailable
from pageframe.api.live import LiveFeed
from pageframe.api.metrics import Metrics
from pageframe.runtime.chat_template import ChatTemplate
from pageframe.runtime.engine_client import EngineClient
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.tokenizer import Tokenizer

#: Work waits and no step was made for so long: the scheduler is stuck.
STUCK_AFTER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Service:
    """A model that is ready.

    Args:
        template: None where the model has no chat template.
        model_name: the name it is served under.
        sampling_defaults: what the model's generation_config says of temperature, top_p, top_k, min_p.
        live: what pages that watch the engine get.
    """

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    model_name: str
    sampling_defaults: Mapping[str, float | int]
    metrics: Metrics
    live: LiveFeed = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "live", LiveFeed(self.client, self.metrics.latencies.summary))

    @property
    def vocab_size(self) -> int:
        return self.client.resolved.model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.client.resolved.max_model_len

    def check_model(self, model: str | None) -> None:
        """Raises: ApiError: 404, `model` is not the served name."""
        if model is not None and model != self.model_name:
            raise ApiError(
                404,
                f"the model {model[:200]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )


@dataclass(slots=True)
class ServerState:
    """Where the server stands in its life: starting, ready, draining. Made inside the running event loop.

    Args:
        access: the keys that open it.
        service: None until the model is ready.
        stopping: set by the first `stop()`; from then on no new work is taken.
        cut: done when running requests are to end at once.
        num_active: generations under way; `idle` is set when there are none.
    """

    config: ServerConfig
    access: Access
    service: Service | None = None
    num_active: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    bodies: BodyReader = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self.bodies = BodyReader(self.config.max_body_bytes)

    @property
    def draining(self) -> bool:
        return self.stopping.is_set()

    def ready(self) -> Service:
        """The service, for looking at.

        Raises:
            ApiError: 503, the model is still loading or the engine is dead.
        """
        if self.service is None:
            raise unavailable("the model is still loading", code="starting", retry=True)
        if not self.service.client.is_alive:
            raise engine_dead()
        return self.service

    def accepting(self) -> Service:
        """The service, for new work.

        Raises:
            ApiError: 503, as in `ready`, or the server is draining.
        """
        if self.draining:
            raise shutting_down()
        return self.ready()

    def check_queue(self, num_choices: int = 1) -> None:
        """The bound of the queue. The engine's latest count of those that run is at most a step old.

        Raises:
            InvalidRequestError: there is no place for so many choices even where nothing else runs or waits.
            ApiError: 429, with a request of so many choices more than max_queue would wait.
        """
        service, max_queue = self.ready(), self.config.max_queue
        client = service.client
        max_running = client.resolved.max_num_requests
        if num_choices > max_running + max_queue:
            raise InvalidRequestError(
                f"n times the number of prompts makes {num_choices} choices; at most {max_running} run at once "
                f"(max_num_requests) and {max_queue} wait (max_queue), so {max_running + max_queue} are the most",
                param="n",
                code="too_many_choices",
            )
        stats = client.stats
        num_waiting = max(0, client.num_outstanding - stats.num_running - stats.num_following)
        # What came since the last step waits too, but may all fit into the next one, up to as many as can run.
        is_too_much = client.num_outstanding + num_choices > max_running + max_queue
        if stats.num_waiting > 0 and num_waiting >= max_queue:
            service.metrics.refused()
            raise queue_full(f"the queue is full: {max_queue} requests wait, and max_queue is {max_queue}")
        if is_too_much:
            service.metrics.refused()
            raise queue_full(
                f"the queue has no room: {client.num_outstanding} requests run or wait and this one makes "
                f"{num_choices} more, where {max_running} may run (max_num_requests) and {max_queue} wait (max_queue)"
            )

    def enter(self) -> None:
        """A generation begins."""
        self.num_active += 1
        self.idle.clear()

    def leave(self) -> None:
        """A generation has ended."""
        self.num_active -= 1
        if self.num_active == 0:
            self.idle.set()

    def stop(self) -> None:
        """The server is to end: running requests may finish. Said once more, they may not."""
        if self.draining:
            self.cut_off()
        self.stopping.set()

    def cut_off(self) -> None:
        """Running requests end now, with an error."""
        if not self.cut.done():
            self.cut.set_result(None)
