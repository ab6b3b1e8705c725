"""A request from the moment it is accepted: parameters, state, and what it gives back each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import GrammarSpec, Matcher

#: Temperatures below this are greedy.
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MAX_CHOICES = 128
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 1024
MAX_TIMEOUT_SECONDS = 3600
#: A request that slides or is preempted often waits often; so many of its waits are remembered.
KEPT_WAITS = 64
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
#: Most tokens, prompt and output, that a request may ask for where its context slides; keeps counts in int32.
MAX_TOTAL_TOKENS = 2**30


class RequestStatus(str, Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
    #: The request itself was at fault, and only the engine could tell, maybe when it had begun.
    REFUSED = "refused"
    #: It never ran: too much of what it needs first waits already. Later there may be room.
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. The defaults are OpenAI's.

    Args:
        n: how many answers to draw, each a choice with a seed of its own.
        max_tokens: most output tokens; None means as many as `max_model_len` leaves.
        min_tokens: before this many output tokens nothing but max_tokens, or a grammar whose text is whole, ends the
            request; end-of-text and stop ids are not sampled, stop strings not looked for.
        temperature: 0 (or below 1e-5) is greedy.
        top_k: 0 or -1 is off; larger than the vocabulary is the whole vocabulary.
        seed: signed 64 bits; None draws one, which is recorded.
        stop: a string or strings that end the text; the string itself is left out unless `include_stop_str_in_output`.
        ignore_eos: end-of-text tokens are ordinary tokens, except where they end a grammar's text.
        logprobs: None for none; k for the chosen token and the k likeliest.
        presence_penalty, frequency_penalty: taken from the logit of a token that the output has: once, and as often as
            it has it.
        repetition_penalty: what the logit of a token that prompt or output has is divided by, or multiplied with where
            it is negative; 1 is off.
        logit_bias: token id -> what is added to its logit.
        bad_words_ids: sequences of tokens that the output must not contain.
        allowed_token_ids: the only tokens that may be drawn, end-of-text tokens not excepted; empty is off.
        prompt_logprobs: as `logprobs`, of the prompt's tokens.
        grammar: what the text must follow.
        timeout_seconds: it ends, with the finish reason "timeout", so long after its arrival at the engine.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0, 10)
        _check_number("top_p", self.top_p, 0, 1, open_low=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_int("top_k", self.top_k, -1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.timeout_seconds is not None:
            _check_number("timeout_seconds", self.timeout_seconds, 0, MAX_TIMEOUT_SECONDS, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        # Kept as tuples; a lone string is one stop string, not its letters.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_stop()
        if self.logit_bias or self.bad_words_ids or self.allowed_token_ids:
            self._check_tokens()

    def without_lists(self) -> SamplingParams:
        """The same without what may be long: of a grammar its kind is left, of the ids that rules name nothing."""
        if self.grammar is None and not (self.logit_bias or self.bad_words_ids or self.allowed_token_ids):
            return self
        grammar = None if self.grammar is None else GrammarSpec(self.grammar.kind)
        return replace(self, logit_bias={}, bad_words_ids=(), allowed_token_ids=(), grammar=grammar)

    def _check_tokens(self) -> None:
        object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "bad_words_ids", tuple(tuple(word) for word in self.bad_words_ids))
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASED_TOKENS} are allowed",
                param="logit_bias",
            )
        for value in self.logit_bias.values():
            _check_number("logit_bias", value, -100, 100)
        if len(self.bad_words_ids) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words_ids has {len(self.bad_words_ids)} sequences; at most {MAX_BAD_WORDS} are allowed",
                param="bad_words_ids",
            )
        for word in self.bad_words_ids:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequestError(
                    f"bad_words_ids has a sequence of {len(word)} tokens; each must have 1 to {MAX_BAD_WORD_TOKENS}",
                    param="bad_words_ids",
                )

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS} are allowed",
                param="stop_token_ids",
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequestError(f"stop has {text!r}; it must be strings", param="stop")
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"stop has a string of {len(text)} characters; each must have 1 to {MAX_STOP_LENGTH}",
                    param="stop",
                )


def _check_number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bounds = f"{'above' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"
        raise InvalidRequestError(f"{name} is {value!r}; it must be {bounds}", param=name)


def _check_int(name: str, value: int, low: int, high: int | None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer {bounds}", param=name)


def choice_ids(request_id: str, n: int) -> list[str]:
    """The ids of a request's n choices: its own where it has one, else with "-0", "-1", … behind it."""
    return [request_id] if n == 1 else [f"{request_id}-{index}" for index in range(n)]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, of the raw logits (before temperature and filters).

    Args:
        logprob: of the token that was chosen.
        top_ids, top_logprobs: the k likeliest, likeliest first, ties to the lower id.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class RequestOutput:
    """What one step gave one request. The only thing that leaves the engine about a request.

    Args:
        token_ids: new output tokens, oldest first; an end-of-text or stop id that ended the request is the last
            of them (the text leaves it out).
        finish_reason: set on the last output of a request, "" until then. One of FinishReason's values.
        stop_token_id: the stop id that ended it, or -1 (an end-of-text token counts as no stop id).
        logprobs: one per new token, empty when not asked for.
        num_cached_tokens: prompt tokens found computed at admission.
        queued_seconds: on a request's first output, from its arrival at the engine to its first step; -1 on others.
        prefill_seconds: likewise, from its first step to its first token.
        error: what failed, when finish_reason is "error"; what is wrong with the request, when it is "refused"; what
            there is too much of, when it is "busy".
        param: the field at fault, when finish_reason is "refused" and one is.
        prompt_logprobs: where asked for, on the first output of the choice that computed the prompt: one for each
            token of the prompt but its first. None on all others, and where the prompt is one token.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""
    stop_token_id: int = -1
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    queued_seconds: float = -1.0
    prefill_seconds: float = -1.0
    error: str = ""
    prompt_logprobs: list[TokenLogprobs] | None = None
    param: str = ""


@dataclass(slots=True)
class Wait:
    """A span of time in which a request could not go on, and why.

    Args:
        reason: "queue" (behind the head of the queue), "blocks" (needs `needed`, `free` are free), "rows" (all
            `max_num_requests` are taken), "budget" (the step's tokens went to others) or "group" (its first choice
            computes the prompt for all).
        behind: who stood before it in the order of service when the wait began, "" for nobody; for "group" that first
            choice.
        since, until: seconds of the engine's clock; None while it lasts.
    """

    reason: str
    since: float
    needed: int = 0
    free: int = 0
    until: float | None = None
    behind: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One choice on its way through the scheduler, which is its one writer.

    While it waits, `token_ids` holds all its tokens; while it runs those of its context live in the scheduler's row
    `row`, and `token_ids` is stale until it is preempted or ends.

    Args:
        salt: whose computed prefixes it may share; see prefix_cache.make_salt.
        followers: the request's other choices, as long as this one computes the prompt for them; `leader` is the
            other way round.
        context_start: tokens that have slid out of the context.
        num_cached_tokens: prompt tokens found computed when it first entered.
        miss_reason, evicted_step: why its latest lookup went no further, see prefix_cache.Lookup; "" before the first.
        waits: the latest ones.
        waited: seconds of all waits that have ended, by reason.
        request_seed: the seed asked for or drawn; `seed` is the choice's own, made from it.
        arrival: a running number; with `priority` it makes the strict order.
        max_total_tokens: prompt plus most output tokens.
        stop_ids: all token ids that end it (end of text and the request's own), empty with none.
        eos_ids: the part of stop_ids that is end of text, reported with no stop reason.
        wants_prompt_logprobs: as long as some of its prompt's logprobs are not known; `prompt_logprobs` are those that
            are, from the prompt's second token on.
        matcher: how far its text has come in its grammar, if it has one.
        deadline: when it ends, finished or not.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    tenant: str
    priority: int
    arrival: int
    arrival_time: float
    request_seed: int
    seed: int
    max_total_tokens: int
    stop_ids: frozenset[int]
    eos_ids: frozenset[int]
    salt: bytes = b""
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    matcher: Matcher | None = None
    deadline: float = math.inf
    followers: list[Request] = field(default_factory=list)
    leader: Request | None = None
    context_start: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    row: int = -1
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    miss_reason: str = ""
    evicted_step: int = -1
    waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=KEPT_WAITS))
    waited: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def context(self) -> npt.NDArray[np.int32]:
        """While it waits: the tokens that the model will see."""
        return self.token_ids[self.context_start :]

    def let_go(self) -> None:
        """It has ended and is kept to be looked at: drop what is long and tells nothing then."""
        self.matcher = None
        self.prompt_logprobs = []
        self.params = self.params.without_lists()

    def truncate(self, num_tokens: int) -> None:
        """Drop the tokens behind the first `num_tokens`."""
        self.token_ids = self.token_ids[:num_tokens]
        self.context_start = min(self.context_start, len(self.token_ids))

    @property
    def order(self) -> tuple[int, int]:
        """Position in the strict order of service: smaller is served first, preempted last."""
        return (self.priority, self.arrival)

    def wait(self, reason: str, now: float, *, needed: int = 0, free: int = 0) -> bool:
        """Record that it cannot go on, with the latest numbers; True where it is a new wait."""
        last = self.waits[-1] if self.waits else None
        if last is not None and last.until is None:
            if last.reason == reason:
                last.needed, last.free = needed, free
                return False
            self._end(last, now)
        self.waits.append(Wait(reason, now, needed, free))
        return True

    def end_wait(self, now: float) -> None:
        """It goes on: the wait that lasts, if any, ends."""
        if self.waits and self.waits[-1].until is None:
            self._end(self.waits[-1], now)

    def _end(self, wait: Wait, now: float) -> None:
        wait.until = now
        self.waited[wait.reason] = self.waited.get(wait.reason, 0.0) + now - wait.since
