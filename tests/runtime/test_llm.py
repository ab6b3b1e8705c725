"""LLM: offline generation with the default model, in float32."""

from __future__ import annotations

import pytest

from pageframe.runtime import LLM, SamplingParams
from pageframe.runtime.errors import ConfigError, InvalidRequestError, ModelError

FRANCE = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=64, max_model_len=512, max_num_requests=8, show_progress=False)


@pytest.fixture(autouse=True)
def leaves_nothing(llm: LLM) -> None:
    yield
    assert not llm.engine.has_work
    llm.engine.scheduler.check_invariants()


def test_a_known_answer_with_everything_a_result_has(llm: LLM) -> None:
    (result,) = llm.generate(FRANCE, GREEDY)
    (choice,) = result.outputs
    assert result.prompt == FRANCE
    assert result.prompt_token_ids == llm.tokenizer.encode(FRANCE, add_special_tokens=True)
    assert choice.text.startswith(" Paris")
    assert llm.tokenizer.decode(choice.token_ids) == choice.text
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("length", None, None)


def test_many_prompts_share_steps_and_come_back_in_order(llm: LLM) -> None:
    prompts = [FRANCE, "1, 2, 3, 4,", llm.tokenizer.encode(FRANCE, add_special_tokens=True)]
    first_step = llm.engine.scheduler.step
    results = llm.generate(prompts, [GREEDY, SamplingParams(temperature=0, max_tokens=3), GREEDY])
    assert llm.engine.scheduler.step - first_step == 8, "all of them should have shared every step"
    assert [result.prompt for result in results] == [FRANCE, "1, 2, 3, 4,", None]
    assert len(results[1].outputs[0].token_ids) == 3
    assert results[2].outputs == results[0].outputs == llm.generate(FRANCE, GREEDY)[0].outputs


@pytest.mark.parametrize("stop", [",", (",", "never")], ids=["string", "tuple"])
def test_a_stop_string_ends_the_text_and_the_tokens(llm: LLM, stop: str | tuple[str, ...]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=stop, logprobs=0)
    (result,) = llm.generate("Red, green, blue, yellow and", params)
    (choice,) = result.outputs
    assert "," not in choice.text
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ",")
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert llm.tokenizer.decode(choice.token_ids).startswith(choice.text + ",")


def test_a_stop_id_is_the_last_token_and_has_no_text(llm: LLM) -> None:
    paris = llm.generate(FRANCE, GREEDY)[0].outputs[0].token_ids[0]
    (result,) = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[paris]))
    (choice,) = result.outputs
    assert (choice.token_ids, choice.text, choice.stop_reason) == ([paris], "", paris)


def test_logprobs_are_of_the_chosen_and_the_likeliest(llm: LLM) -> None:
    (result,) = llm.generate(FRANCE, SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    (choice,) = result.outputs
    assert choice.logprobs is not None
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position.top_ids[0] == token_id, "greedy takes the likeliest"
        assert position.logprob == position.top_logprobs[0] <= 0
        assert position.top_logprobs == sorted(position.top_logprobs, reverse=True)
        assert len(position.top_ids) == 3


def test_a_seed_draws_the_same_beside_others(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=12, seed=7)
    (alone,) = llm.generate(FRANCE, seeded)
    among = llm.generate(["Once upon a time", FRANCE, "def f(x):"], [SamplingParams(max_tokens=12), seeded, GREEDY])
    assert among[1].outputs == alone.outputs
    assert llm.generate(FRANCE, SamplingParams(temperature=1.0, max_tokens=12, seed=8))[0].outputs != alone.outputs


def test_several_choices_are_outputs_in_order(llm: LLM) -> None:
    alone = llm.generate(FRANCE, GREEDY)[0].outputs
    (result,) = llm.generate(FRANCE, SamplingParams(n=3, temperature=0, max_tokens=8))
    assert result.outputs == alone * 3
    seeded = SamplingParams(n=3, seed=7, max_tokens=12)
    (first, other), (again,) = llm.generate([FRANCE, "2 + 2 ="], seeded), llm.generate(FRANCE, seeded)
    texts = [choice.text for choice in first.outputs]
    assert len(set(texts)) == 3
    assert [choice.text for choice in again.outputs] == texts
    assert len(other.outputs) == 3
    assert texts[0] == llm.generate(FRANCE, SamplingParams(seed=7, max_tokens=12))[0].outputs[0].text


def test_each_choice_ends_at_its_own_stop_string(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=2, max_tokens=24, stop=[",", "."])
    (free,) = llm.generate("Red, green, blue and", SamplingParams(n=4, seed=2, max_tokens=24))
    (result,) = llm.generate("Red, green, blue and", params)
    ends = set()
    for choice, whole in zip(result.outputs, free.outputs, strict=True):
        places = [place for stop in params.stop if (place := whole.text.find(stop)) >= 0]
        assert choice.text == whole.text[: min(places)] if places else whole.text
        assert choice.finish_reason == ("stop" if places else whole.finish_reason)
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
        ends.add(len(choice.token_ids))
    assert len(ends) > 1, "the choices were meant to end at different places"


def test_chat_answers_a_conversation(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in result.outputs[0].text
    assert len(llm.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Bye"}]], GREEDY)) == 2


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        ("", GREEDY, "prompt is empty"),
        ([FRANCE, []], GREEDY, "prompt is empty"),
        ([[1, 2, 10**6]], GREEDY, "1000000"),
        (FRANCE, SamplingParams(max_tokens=10_000), "max_tokens is 10000"),
        ([FRANCE, FRANCE], [GREEDY, SamplingParams(n=9)], "n is 9; it must be at most 8"),
        ([[5] * 600], GREEDY, "600 tokens"),
        ([FRANCE, FRANCE], [GREEDY], "1 entries for 2 prompts"),
    ],
)
def test_what_cannot_be_served_is_refused_whole(llm: LLM, prompts: object, params: object, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm.generate(FRANCE, GREEDY)[0].outputs[0].text.startswith(" Paris")


def test_settings_at_fault_are_named() -> None:
    with pytest.raises(ModelError, match="/nowhere"):
        LLM("/nowhere", show_progress=False)
    with pytest.raises(ConfigError, match="block_size is 3"):
        LLM(block_size=3, show_progress=False)
