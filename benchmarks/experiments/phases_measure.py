"""The measurements of `pageframe bench phases`: an engine, its clock, and what each phase takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from pageframe.benchmarks.experiments.floor import measure_floors
from pageframe.benchmarks.experiments.phases_report import Cell, Chat, ChatCost, Results
from pageframe.benchmarks.experiments.report import TimeBudget, engine_line
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import EngineError
from pageframe.runtime.memory_plan import free_memory, kv_bytes_per_token
from pageframe.runtime.model_runner import ModelRunner
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import RequestOutput, SamplingParams

DEFAULTS = EngineConfig()

Advance = Callable[[], object]


def no_time(budget: float) -> str:
    """Why something is not measured."""
    return f"no time left of {budget:.3g} s"


class Phases:
    """An engine as it is served, and what it is compared with.

    Args:
        longest: tokens of the longest request.
        num_requests: most requests at once.
        pool_tokens: tokens that the pool should hold at once; it takes no more than half of the free memory.
    """

    def __init__(self, model: str, dtype: str, *, longest: int, num_requests: int, pool_tokens: int) -> None:
        config = load_model_config(resolve_source(model))
        block_size = DEFAULTS.block_size
        block_bytes = block_size * kv_bytes_per_token(config, dtype)
        # Of each request the last block may be begun, and a first one stays behind from a prompt that is now shared.
        wanted = -(-max(pool_tokens, longest) // block_size) + 256
        smallest = -(-longest // block_size)
        # Half of a step is left for prompts when nearly all decode, so that the last ones can join the first.
        token_budget = max(DEFAULTS.token_budget("cpu"), 2 * num_requests)
        self._engine = build_engine(
            EngineConfig(
                model=model,
                dtype=dtype,
                max_model_len=longest,
                num_blocks=max(smallest, min(wanted, free_memory() // 2 // block_bytes)),
                max_num_requests=max(DEFAULTS.max_num_requests, num_requests),
                max_num_batched_tokens=token_budget,
                mixed_token_budget=token_budget,
            )
        )
        assert isinstance(self._engine.runner, ModelRunner)
        resolved = self._engine.resolved
        self._engine.runner.fill_blocks(range(resolved.num_blocks), 0.0)  # a page's first touch takes time
        self._floors = measure_floors(self._engine)
        self._chunk = resolved.max_num_batched_tokens
        self._random = np.random.default_rng(0)
        self._numbers = itertools.count()
        self.machine_line = f"{engine_line(resolved)}; {self._floors.machine}"

    # ---- whole requests

    def hold_chats(self, chats: Sequence[Chat], budget: float, results: Results, advance: Advance) -> None:
        """Each chat alone, one after the other, each turn behind all that was said before it."""
        time_budget = TimeBudget(budget)
        self._answer(self._prompt(min(16, self._engine.resolved.max_model_len // 2)), 4, time_budget)  # a warm-up
        for chat in chats:
            cost = ChatCost(chat)
            history: list[int] = []
            for _ in range(chat.turns):
                if not time_budget.allows(cost.seconds / max(1, len(cost.first_tokens))):
                    break
                history += self._prompt(chat.prompt)
                answer = self._turn(history, chat.answer, cost, time_budget)
                if answer is None:
                    break
                history += answer
            else:
                results.chats[chat] = cost
            if chat not in results.chats:
                results.skipped[chat] = no_time(budget)
            advance()

    def _turn(self, prompt: list[int], answer: int, cost: ChatCost, time_budget: TimeBudget) -> list[int] | None:
        """The answer's tokens; None where the time was over first."""
        made = self._answer(prompt, answer, time_budget)
        if made is None:
            return None
        tokens, seconds, cached = made
        computed = len(prompt) - cached
        cost.prompt_tokens += len(prompt)
        cost.cached_tokens += cached
        cost.first_tokens.append(seconds[0])
        cost.prefill_floor += self._floors.prefill(computed, self._chunk, cached).seconds
        cost.decode_seconds += sum(seconds[1:])
        cost.decoded_tokens += len(seconds) - 1
        for num_made in range(1, len(seconds)):
            cost.decode_floor += self._floors.decode([len(prompt) + num_made]).seconds
        return tokens

    def _answer(
        self, prompt: list[int], num_tokens: int, time_budget: TimeBudget
    ) -> tuple[list[int], list[float], int] | None:
        """One request alone: its tokens, the seconds from each to the next, and the prompt tokens found computed.

        None where the time was over first.
        """
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        tokens: list[int] = []
        seconds: list[float] = []
        num_cached = 0
        started = time.perf_counter()
        self._engine.add(self._new_id(), prompt, params)
        while self._engine.has_work:
            if not time_budget.allows():
                self._drop_all()
                return None
            for output in self._step():
                tokens += output.token_ids
                num_cached += output.num_cached_tokens
                seconds.append(time.perf_counter() - started)
                started = time.perf_counter()
        return tokens, seconds, num_cached

    # ---- first tokens

    def first_tokens(
        self, prompt_lens: Sequence[int], repeats: int, budget: float, results: Results, advance: Advance
    ) -> None:
        """Every length in turn, `repeats` times, each prompt a new one."""
        time_budget = TimeBudget(budget)
        times: dict[int, list[float]] = {}
        for _ in range(repeats):
            for length in prompt_lens:
                known = times.get(length)
                # Not seen yet, it takes at least as long per token as the one before.
                shorter = max((other for other in times if other < length), default=None)
                expected = known[-1] if known else times[shorter][-1] * length / shorter if shorter else 0.0
                made = self._answer(self._prompt(length), 1, time_budget) if time_budget.allows(expected) else None
                if made is None:
                    results.skipped[length] = no_time(budget)
                else:
                    _, (seconds,), num_cached = made
                    assert num_cached == 0, "a new prompt was to be computed"
                    times.setdefault(length, []).append(seconds)
                    floor = self._floors.prefill(length, self._chunk)
                    results.first_tokens[length] = Cell(median(times[length]), floor.seconds, floor.bound)
                advance()

    # ---- decoding

    def decode(
        self,
        contexts: Sequence[int],
        requests: Sequence[int],
        steps: int,
        budget: float,
        results: Results,
        advance: Advance,
    ) -> None:
        """Seconds of a step of pure decode, by context and number of requests.

        Prompts grow from cell to cell, so that the prefix cache has all but their new part: all requests of a cell then
        begin to decode within a few steps.
        """
        self._engine.reset_prefix_cache()
        time_budget = TimeBudget(budget)
        resolved = self._engine.resolved
        prompts: list[list[int]] = [[] for _ in range(requests[-1])]
        seconds_per_token = 0.0
        for context in contexts:
            for num_requests in requests:
                parts = prompts[:num_requests]
                missing = sum(context - len(prompt) for prompt in parts)
                blocks = num_requests * -(-(context + steps + 1) // resolved.block_size)
                if blocks > resolved.num_blocks:
                    skipped = f"{blocks:,} blocks needed, {resolved.num_blocks:,} in the pool"
                elif not time_budget.allows(missing * seconds_per_token):
                    skipped = no_time(budget)
                else:
                    started = time.perf_counter()
                    for prompt in parts:
                        prompt += self._prompt(context - len(prompt))
                    cell = self._compute(parts, time_budget) and self._decode_cell(parts, steps, time_budget)
                    if cell:
                        results.decode[context, num_requests] = cell
                        seconds_per_token = (time.perf_counter() - started) / missing if missing else seconds_per_token
                    skipped = "they never all decoded at once" if time_budget.allows() else no_time(budget)
                if (context, num_requests) not in results.decode:
                    results.skipped[context, num_requests] = skipped
                advance()

    def _compute(self, prompts: Sequence[list[int]], time_budget: TimeBudget) -> bool:
        """Have the prefix cache know these prompts; False where the time was over first."""
        for prompt in prompts:
            self._engine.add(self._new_id(), prompt, SamplingParams(temperature=0, max_tokens=1))
        while self._engine.has_work and time_budget.allows():
            self._step()
        return not self._drop_all()

    def _decode_cell(self, prompts: Sequence[list[int]], steps: int, time_budget: TimeBudget) -> Cell | None:
        """The median of up to `steps` steps in which all requests decode; None where the time was over first."""
        made = {self._new_id(): 0 for _ in prompts}
        params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
        for request_id, prompt in zip(made, prompts, strict=True):
            self._engine.add(request_id, prompt, params)
        times: list[float] = []
        floors: list[tuple[float, str]] = []
        while self._engine.has_work and time_budget.allows():
            started = time.perf_counter()
            outputs = self._step()
            seconds = time.perf_counter() - started
            record = self._engine.steps[-1]
            if record.decode_tokens == len(prompts) and record.prefill_tokens == 0:
                floor = self._floors.decode([len(prompts[0]) + count for count in made.values()])
                times.append(seconds)
                floors.append((floor.seconds, floor.bound))
            for output in outputs:
                made[output.request_id] += len(output.token_ids)
        self._drop_all()
        return Cell(median(times), *floors[len(floors) // 2]) if times else None

    def _step(self) -> list[RequestOutput]:
        """One step of the engine.

        Raises:
            EngineError: its forward pass failed.
        """
        outputs = self._engine.step()
        for output in outputs:
            if output.error:
                raise EngineError(output.error)
        return outputs

    def _drop_all(self) -> bool:
        """Abort whatever still runs or waits; whether there was anything."""
        live = self._engine.scheduler.live_requests()
        for request in live:
            self._engine.abort(request.request_id)
        return bool(live)

    def _prompt(self, length: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._engine.resolved.model.vocab_size, length).tolist()
        return ids

    def _new_id(self) -> str:
        return f"request-{next(self._numbers)}"
