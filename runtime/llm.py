"""LLM: offline generation, with the engine in this very process.

from pageframe.runtime import LLM, SamplingParams

llm = LLM()
for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(result.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import DEFAULT_MODEL, EngineConfig, ResolvedConfig
from pageframe.runtime.engine_builder import build_engine
from pageframe.runtime.errors import EngineError, InvalidRequestError
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, choice_ids
from pageframe.runtime.text import TextStream
from pageframe.runtime.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True)
class ChoiceResult:
    """One answer.

    Args:
        token_ids: output tokens, an end token that ended it included (its text is not).
        finish_reason: "stop", "length" or "timeout".
        stop_reason: the stop string or stop token id that ended it, if one of the request's own did.
        logprobs: one per token, None where not asked for.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class GenerationResult:
    """What became of one prompt.

    Args:
        prompt: None where it was token ids.
        outputs: its params.n choices.
        prompt_logprobs: one for each of its tokens but the first; None where not asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[ChoiceResult]
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class _Open:
    """A choice under way."""

    result: ChoiceResult
    stream: TextStream
    whole: GenerationResult


class LLM:
    """A model in this process.

    Args:
        model: a GGUF file, a Hugging Face folder or a hub id; the default model without one.
        engine_config: any other field of EngineConfig, such as `dtype="float32"` or `num_blocks=64`. Without a
            mixed_token_budget no step is kept short: see `EngineConfig.offline`.

    Raises:
        StartupError: the model or a setting is at fault.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, show_progress: bool = True, **engine_config: Any) -> None:
        source = resolve_source(model)
        self._show_progress = show_progress
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self._template = load_chat_template(source, self.tokenizer)
        with self._progress(f"loading {source.name}") as advance:
            self.engine = build_engine(EngineConfig.offline(model=model, **engine_config), advance)
        self._num_requests = 0

    @property
    def resolved(self) -> ResolvedConfig:
        return self.engine.resolved

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Continue each prompt; all of them share every step.

        Args:
            prompts: one prompt or several; a prompt is text or a list of token ids.
            params: for all prompts, or one for each; SamplingParams() by default.

        Returns:
            one result per prompt, in order.

        Raises:
            InvalidRequestError: a prompt or its parameters can never be served, or they leave no token that may come
                next; there are no results.
            EngineError: a forward pass failed.
        """
        many = _as_list(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise InvalidRequestError(f"params has {len(each)} entries for {len(many)} prompts", param="params")
        results = []
        opened: dict[str, _Open] = {}
        try:
            for prompt, one in zip(many, each, strict=True):
                results.append(self._open(prompt, one, opened))
            self._run(opened)
        finally:
            for choice_id in opened:
                self.engine.abort(choice_id)
        return results

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[GenerationResult]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the model's own template.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use generate()", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = []
        for conversation in conversations:
            text = self._template.render(list(conversation), add_generation_prompt=add_generation_prompt)  # type: ignore[arg-type]
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, params)

    def _open(self, prompt: Prompt, params: SamplingParams, opened: dict[str, _Open]) -> GenerationResult:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        request_id = f"llm-{self._num_requests}"
        self.engine.add(request_id, ids, params)
        self._num_requests += 1
        result = GenerationResult(text, ids, [], None if params.prompt_logprobs is None else [])
        for choice_id in choice_ids(request_id, params.n):
            choice = ChoiceResult(logprobs=None if params.logprobs is None else [])
            result.outputs.append(choice)
            opened[choice_id] = _Open(choice, TextStream(self.tokenizer, params), result)
        return result

    def _run(self, opened: dict[str, _Open]) -> None:
        """Step until all are done; what is finished leaves `opened`."""
        total = len(opened)
        with self._progress("generating") as advance:
            while opened:
                for output in self.engine.step():
                    choice = opened.get(output.request_id)
                    if choice is not None and self._take(choice, output):
                        del opened[output.request_id]
                        advance(total - len(opened), total)

    def _take(self, choice: _Open, output: RequestOutput) -> bool:
        """Add a step's output to a result; whether that was its last."""
        if output.finish_reason == FinishReason.ERROR.value:
            raise EngineError(output.error)
        if output.finish_reason == FinishReason.REFUSED.value:
            raise InvalidRequestError(output.error, param=output.param or None)
        if output.prompt_logprobs:
            choice.whole.prompt_logprobs = output.prompt_logprobs
        result = choice.result
        ended = output.finish_reason == FinishReason.STOP.value
        text_ids = output.token_ids[:-1] if ended else output.token_ids
        delta = choice.stream.push(text_ids, final=bool(output.finish_reason))
        result.text += delta.text
        result.token_ids += output.token_ids
        if result.logprobs is not None:
            result.logprobs += output.logprobs
        if delta.stop is not None:
            self.engine.finish(output.request_id, delta.num_tokens)
            del result.token_ids[delta.num_tokens :]
            if result.logprobs is not None:
                del result.logprobs[delta.num_tokens :]
            result.finish_reason, result.stop_reason = FinishReason.STOP.value, delta.stop
            return True
        result.finish_reason = output.finish_reason
        result.stop_reason = None if output.stop_token_id < 0 else output.stop_token_id
        return bool(output.finish_reason)

    @contextmanager
    def _progress(self, title: str) -> Iterator[Callable[[int, int], None]]:
        """A bar on standard error; gives what to call with (done, total)."""
        # Where only the engine's own dependencies are installed, LLM works without a bar.
        if not self._show_progress or find_spec("rich") is None:
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
