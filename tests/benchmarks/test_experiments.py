"""The experiments' own parts: what they count and how they read files, without a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.chain_hash import ChainHashModel
from fakes.engines import VirtualClock, tiny_config

from pageframe.benchmarks.experiments import conversation_files, conversations, prefix_cache, scheduling_cost, sessions
from pageframe.runtime.engine import Engine


def chain_hash_engine() -> Engine:
    resolved = tiny_config(num_blocks=64, block_size=4, max_num_requests=4, max_num_batched_tokens=64, max_model_len=40)
    model = ChainHashModel(
        num_blocks=resolved.num_blocks,
        block_size=resolved.block_size,
        max_num_requests=resolved.max_num_requests,
        max_blocks=resolved.max_blocks,
    )
    return Engine(resolved, model, model, seed=0, clock=VirtualClock())


def growing(start: int, lengths: list[int]) -> conversations.Conversation:
    """Prompts of these lengths, each the beginning of the next."""
    for length in lengths:
        yield list(range(start, start + length))


def test_conversations_are_held_to_their_ends_and_counted_by_turn() -> None:
    engine, done = chain_hash_engine(), []
    talks = [growing(start, [9, 18]) for start in (1000, 2000, 3000)]
    held = sessions.hold(engine, talks, 2, 3, lambda: done.append(1))
    # Of the first 9 tokens two blocks of 4 are full, and their K and V were computed.
    assert held.turns == [sessions.Turn(3, 27, 0), sessions.Turn(3, 54, 24)]
    assert (held.cut_short, len(done)) == (0, 3)
    assert (engine.scheduler.num_lookup_tokens, engine.scheduler.num_hit_tokens) == (81, 24)


def test_a_conversation_that_outgrows_the_context_is_cut_short() -> None:
    held = sessions.hold(chain_hash_engine(), [growing(1000, [10, 38]), growing(2000, [38])], 2, 3, lambda: None)
    assert [turn.requests for turn in held.turns] == [1]
    assert held.cut_short == 2


def test_any_number_of_conversations_may_be_too_long() -> None:
    done: list[int] = []
    talks = [*(growing(1000, [38]) for _ in range(3000)), growing(2000, [9])]
    held = sessions.hold(chain_hash_engine(), talks, 1, 3, lambda: done.append(1))
    assert held == sessions.Held([sessions.Turn(1, 9, 0)], cut_short=3000)
    assert len(done) == 3001


def test_an_answer_is_part_of_the_next_turn() -> None:
    class Words(conversations.Chat):
        """Reads and writes a text as the lengths of its words."""

        def __init__(self) -> None:
            pass

        def prompt(self, messages: object) -> list[int]:
            assert isinstance(messages, list)
            return [len(word) for message in messages for word in message["content"].split()]

        def text(self, token_ids: list[int]) -> str:
            return " ".join("x" * token_id for token_id in token_ids)

    conversation = conversations.asked_in_turn(Words(), ["a bb", "ccc"])
    assert next(conversation) == [1, 2]
    assert conversation.send([5, 6]) == [1, 2, 5, 6, 3]


def test_files_of_questions_and_of_sessions_are_read(tmp_path: Path) -> None:
    questions = tmp_path / "question.jsonl"
    questions.write_text(json.dumps({"question_id": 81, "turns": ["first", "second"]}) + "\n")
    assert conversation_files.read_mt_bench(tmp_path) == [["first", "second"]]
    assert conversation_files.read_mt_bench(questions) == [["first", "second"]]

    sessions = tmp_path / "sessions"
    sessions.mkdir()
    calls = [(30, "b", "late"), (10, "a", "one"), (20, "b", "early"), (40, "a", "two")]
    lines = [json.dumps({"timestamp": time, "session_id": name, "input": text}) for time, name, text in calls]
    (sessions / "1.jsonl").write_text("\n".join(lines[:2]))
    (sessions / "2.jsonl").write_text("\n".join(lines[2:]))
    (sessions / "3.jsonl").write_text("")
    assert conversation_files.read_taubench(sessions) == [["one", "two"], ["early", "late"]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("not json", "line 1 is not JSON"), ("[]", "line 1 is not a JSON object"), ('{"turns": []}', "turns holds no")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "question.jsonl").write_text(line)
    with pytest.raises(conversation_files.PromptFileError, match=complaint):
        conversation_files.read_mt_bench(tmp_path)


def test_the_interval_of_equal_pairs_is_a_point_and_of_scattered_ones_holds_the_ratio() -> None:
    assert prefix_cache.paired_ratio([3.0, 6.0], [2.0, 4.0]) == prefix_cache.Interval(1.5, 1.5, 1.5)
    scattered = prefix_cache.paired_ratio([1.0, 1.2, 0.9, 1.1, 0.8], [1.0] * 5)
    assert scattered.ratio == pytest.approx(1.0)
    # By hand: the standard error is 0.0632, and 95% of a normal distribution lie within 1.96 of it.
    assert scattered.low == pytest.approx(1 - 0.124, abs=0.03)
    assert scattered.high == pytest.approx(1 + 0.124, abs=0.03)


def test_the_scheduler_alone_is_timed_in_pure_decode() -> None:
    lone = scheduling_cost.LoneScheduler(5, num_steps=4)
    cost = scheduling_cost.step_cost(lone, num_steps=3)
    assert cost.num_requests == 5
    assert min(cost.schedule, cost.build, cost.update) > 0
    matching = scheduling_cost.match_cost(lone, repeats=1)
    assert matching.num_findable > scheduling_cost.NUM_PROMPTS * scheduling_cost.MATCHED_BLOCKS
    assert min(matching.hit, matching.miss) > 0
