"""vLLM as a worker of `peers`, run by vLLM's own Python: it imports vllm and the standard library, nothing of ours.

    python peers_vllm_worker.py MODEL_FOLDER MAX_MODEL_LEN DTYPE

Writes {"version": ...} when it is loaded. Each line that it reads, {"prompts": [[token ids], ...], "output": tokens},
is answered with {"seconds": ...}: from the prompts' token ids to the last token, greedy, end of text ignored.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def seconds(llm: Any, prompts: list[list[int]], output: int) -> float:
    """How long vLLM takes for `output` tokens behind each prompt, without turning them into text."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    started = time.perf_counter()
    answers = llm.generate(inputs, params, use_tqdm=False)
    taken = time.perf_counter() - started
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    if made != len(prompts) * output:
        raise RuntimeError(f"{made} tokens instead of {len(prompts) * output}")
    return taken


def main() -> None:
    # vLLM and its children write their logs to descriptor 1.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    llm = vllm.LLM(
        model=sys.argv[1],
        dtype=sys.argv[3],
        max_model_len=int(sys.argv[2]),
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        seed=0,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps({"seconds": seconds(llm, work["prompts"], work["output"])}), file=answers)


if __name__ == "__main__":
    main()
