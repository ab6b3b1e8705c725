"""Conversations of several turns, written at random or read from files, and how they are held a few at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pageframe.benchmarks.experiments.conversation_files import PromptFileError, read_mt_bench, read_taubench
from pageframe.benchmarks.experiments.conversations import Chat, Conversation, asked_in_turn, recorded
from pageframe.benchmarks.experiments.driver import Answer, Ask, serve
from pageframe.benchmarks.experiments.report import InputError, TimeBudget
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.engine import Engine
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.tokenizer import load_tokenizer

#: Makes the first so many sessions anew.
Sessions = Callable[[int], list[Conversation]]


def prompt_of(length: int, generator: np.random.Generator, vocab_size: int) -> list[int]:
    """Random tokens; the first ids are left out, which models keep for control."""
    ids: list[int] = generator.integers(min(10, vocab_size - 1), vocab_size, length).tolist()
    return ids


def drawn_length(around: int, generator: np.random.Generator) -> int:
    """From half of `around` to half as much again."""
    return int(generator.integers(-(-around // 2), longest_drawn(around), endpoint=True))


def longest_drawn(around: int) -> int:
    return around + around // 2


def synthetic_session(system: list[int], users: Sequence[list[int]]) -> Conversation:
    """Each turn is all before it, the answer it got, and a new message."""
    prompt = list(system)
    for user in users:
        prompt = [*prompt, *user]
        answer = yield prompt
        prompt = [*prompt, *answer]


def synthetic_sessions(
    count: int, *, turns: int, system_tokens: int, user_tokens: int, vocab_size: int, seed: int
) -> list[Conversation]:
    """Sessions behind one system prompt, all of random tokens; a turn's length is drawn around `user_tokens`."""
    generator = np.random.default_rng(seed)
    system = prompt_of(system_tokens, generator, vocab_size)
    return [
        synthetic_session(
            system, [prompt_of(drawn_length(user_tokens, generator), generator, vocab_size) for _ in range(turns)]
        )
        for _ in range(count)
    ]


def read_sessions(path: Path, model: str) -> Sessions:
    """From a file of sessions what makes the first so many of them: two-turn questions ("turns"), or recorded sessions
    ("session_id"), JSON lines, one file or a folder of them.

    Raises:
        InputError: the file can't be read, or the model has no chat template.
    """
    source = resolve_source(model)
    tokenizer = load_tokenizer(source)
    template = load_chat_template(source, tokenizer)
    if template is None:
        raise InputError(f"sessions is {path}; model {model!r} has no chat template to write them with")
    chat = Chat(tokenizer, template)
    try:
        try:
            questions = read_mt_bench(path)
        except PromptFileError:
            calls = read_taubench(path)
            return lambda count: [recorded(chat, texts) for texts in calls[:count]]
    except PromptFileError as error:
        raise InputError(f"sessions is {path}; it holds neither questions nor recorded sessions: {error}") from error
    return lambda count: [asked_in_turn(chat, turns) for turns in questions[:count]]


class Holder:
    """Holds conversations with an engine, a few at a time.

    Args:
        ignore_eos: answers run to their full length.
        longest: a prompt past this many tokens ends its conversation.
        seed: the length of each answer is drawn around answer_tokens, by session and turn; None: all have that many.
        ended: called after each conversation, also one that was cut short.
    """

    def __init__(
        self,
        conversations: Iterable[Conversation],
        *,
        answer_tokens: int,
        ignore_eos: bool,
        longest: int,
        seed: int | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._waiting = enumerate(conversations)
        self._answer_tokens = answer_tokens
        self._ignore_eos = ignore_eos
        self._longest = longest
        self._seed = seed
        self._ended = ended
        self._open: dict[str, tuple[int, int, Conversation]] = {}
        self.cut_short = 0

    def first(self, count: int) -> list[Ask]:
        """The first turns of that many conversations."""
        asks = [self._next() for _ in range(count)]
        return [ask for ask in asks if ask is not None]

    def follow(self, answer: Answer) -> Iterator[Ask]:
        """The next turn; where a conversation has ended, the first turn of the next one."""
        session, turn, conversation = self._open.pop(answer.ask.name)
        ask = None
        try:
            prompt = conversation.send(answer.tokens)
        except StopIteration:
            self._ended()
        else:
            ask = self._ask(session, turn + 1, conversation, prompt)
        ask = ask or self._next()
        if ask is not None:
            yield ask

    def _next(self) -> Ask | None:
        """The first turn of the next conversation that begins with a prompt short enough; None where there is none."""
        for session, conversation in self._waiting:
            ask = self._ask(session, 0, conversation, next(conversation))
            if ask is not None:
                return ask
        return None

    def _ask(self, session: int, turn: int, conversation: Conversation, prompt: list[int]) -> Ask | None:
        """None where the prompt is too long, which ends its conversation."""
        if len(prompt) > self._longest:
            self.cut_short += 1
            self._ended()
            return None
        name = f"session-{session}-turn-{turn}"
        self._open[name] = (session, turn, conversation)
        answer_tokens = self._answer_tokens
        if self._seed is not None:
            answer_tokens = drawn_length(answer_tokens, np.random.default_rng([self._seed, session, turn]))
        return Ask(name, prompt, answer_tokens, ignore_eos=self._ignore_eos)


@dataclass(slots=True)
class Turn:
    """Sums over the conversations that had this turn.

    Args:
        cached_tokens: prompt tokens found computed.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Held:
    """Conversations that were held.

    Args:
        turns: the first, the second, and so on.
        cut_short: conversations that ended because a prompt left no room for an answer.
    """

    turns: list[Turn] = field(default_factory=list)
    cut_short: int = 0


def hold(
    engine: Engine,
    conversations: Iterable[Conversation],
    concurrency: int,
    answer_tokens: int,
    ended: Callable[[], object],
) -> Held:
    """Hold all conversations to their ends, `concurrency` at a time, with answers of up to `answer_tokens` tokens.

    Raises:
        EngineError: a forward pass failed.
    """
    longest = engine.resolved.max_model_len - answer_tokens
    holder = Holder(conversations, answer_tokens=answer_tokens, ignore_eos=False, longest=longest, ended=ended)
    held = Held()
    for answer in serve(engine, holder.first(concurrency), TimeBudget(math.inf), follow=holder.follow):
        index = turn_of(answer)
        while len(held.turns) <= index:
            held.turns.append(Turn())
        held.turns[index].requests += 1
        held.turns[index].prompt_tokens += len(answer.ask.prompt)
        held.turns[index].cached_tokens += answer.num_cached
    held.cut_short = holder.cut_short
    return held


def turn_of(answer: Answer) -> int:
    """Which turn of its conversation a Holder's request was, from 0."""
    return int(answer.ask.name.rpartition("-")[2])
