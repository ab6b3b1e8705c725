"""Which JSON schemas can be followed, and are they? Every schema of a folder, its documents, and the model's own texts.

    python -m pageframe.benchmarks.experiments.grammar_coverage FOLDER [--generations 100] [--quick] [--json FILE]

FOLDER holds *.jsonl files of schemas with documents (see grammar_cases.py). Asked of each schema: does it compile;
does its grammar accept each valid document and reject each invalid one; and, for some of them, is what the model writes
under it JSON that the package jsonschema finds valid, where it was not cut off at its length. A schema that is refused
is counted, with the reason: that is a 400 and no wrong answer. A document that is wrongly accepted or rejected is
named.

A grammar fixes the order of an object's properties to the schema's, so a valid document counts as accepted if it is
accepted in that order; how many are accepted as they stand is shown beside it. Documents that are judged wrongly are
where llguidance departs from the specification (1.0 is no integer, and some formats are checked less or more); they are
shown and change nothing. A text of the model's own that is not valid makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from pageframe.benchmarks.experiments.grammar_cases import GrammarCase, in_schema_order, read_cases
from pageframe.benchmarks.experiments.report import check_outputs, engine_line, run_experiment, write_json
from pageframe.runtime.chat_template import load_chat_template
from pageframe.runtime.config import DEFAULT_MODEL
from pageframe.runtime.errors import InvalidRequestError
from pageframe.runtime.grammar import CompiledGrammar, GrammarSpec
from pageframe.runtime.grammar_compiler import GrammarCompiler
from pageframe.runtime.grammar_vocabulary import ModelTokens
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.request import FinishReason, SamplingParams
from pageframe.runtime.tokenizer import load_tokenizer

QUICK_CASES, QUICK_TEXTS, QUICK_TOKENS = 10, 4, 64
NUM_REASONS, NUM_NAMES = 12, 20


@dataclass(slots=True)
class CaseResult:
    """What became of one schema.

    Args:
        refused: why it does not compile, "" where it does.
        seconds: that it took to compile.
        accepted, accepted_as_written: of its valid documents.
        rejected: of its invalid ones.
        wrong: the documents that were judged wrongly, as JSON.
    """

    group: str
    name: str
    num_valid: int
    num_invalid: int
    refused: str = ""
    seconds: float = 0.0
    accepted: int = 0
    accepted_as_written: int = 0
    rejected: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TextResult:
    """What the model wrote under one schema.

    Args:
        outcome: "valid", "length" (cut off), or what is wrong with it.
    """

    group: str
    name: str
    outcome: str
    text: str


def judge(case: GrammarCase, compiler: GrammarCompiler, tokens: ModelTokens) -> CaseResult:
    """What becomes of a schema and its documents."""
    result = CaseResult(case.group, case.name, len(case.valid), len(case.invalid))
    started = time.perf_counter()
    try:
        grammar = compiler.compile(grammar_of(case), param="schema")
    except InvalidRequestError as error:
        result.refused = error.message
        return result
    finally:
        result.seconds = time.perf_counter() - started
    for document in case.valid:
        as_written = follows(grammar, document, tokens)
        accepted = as_written or follows(grammar, in_schema_order(document, case.schema), tokens)
        result.accepted_as_written += as_written
        result.accepted += accepted
        if not accepted:
            result.wrong.append(f"valid, but rejected: {json.dumps(document)}")
    for document in case.invalid:
        documents = (document, in_schema_order(document, case.schema))
        rejected = not any(follows(grammar, ordered, tokens) for ordered in documents)
        result.rejected += rejected
        if not rejected:
            result.wrong.append(f"invalid, but accepted: {json.dumps(document)}")
    return result


def follows(grammar: CompiledGrammar, document: Any, tokens: ModelTokens) -> bool:
    """Whether a grammar accepts a document as json.dumps writes it."""
    matcher = grammar.matcher()
    text = json.dumps(document, ensure_ascii=False).encode()
    return all(map(matcher.accept, tokens.spell_greedily(text))) and matcher.is_accepting


def validate(case: GrammarCase, text: str) -> str:
    """ "valid", or what is wrong with a text that the schema's grammar let pass."""
    import jsonschema

    schema = case.schema
    if isinstance(schema, dict) and case.draft:
        schema = {"$schema": case.draft} | schema
    checker = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(checker(schema).iter_errors(document), None)
    return "valid" if found is None else f"not valid: {found.message}"


def write_texts(cases: Sequence[GrammarCase], *, max_tokens: int, temperature: float) -> tuple[list[TextResult], str]:
    """What the default model writes under each schema, and the line about machine and engine."""
    source = resolve_source(DEFAULT_MODEL)
    llm = LLM(DEFAULT_MODEL)
    template = load_chat_template(source, llm.tokenizer)
    assert template is not None
    prompts: list[Sequence[int]] = []
    params = []
    for index, case in enumerate(cases):
        request = f"Write a short example of a JSON document of the kind {case.name!r}. Answer with the JSON alone."
        text = template.render([{"role": "user", "content": request}])
        prompts.append(llm.tokenizer.encode(text, add_special_tokens=False))
        spec = grammar_of(case)
        params.append(SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index, grammar=spec))
    results = []
    for case, generated in zip(cases, llm.generate(prompts, params), strict=True):
        choice = generated.outputs[0]
        outcome = "length" if choice.finish_reason == FinishReason.LENGTH.value else validate(case, choice.text)
        results.append(TextResult(case.group, case.name, outcome, choice.text))
    return results, engine_line(llm.resolved)


def grammar_of(case: GrammarCase) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(case.schema))


def pick(cases: Sequence[GrammarCase], count: int) -> list[GrammarCase]:
    """Up to `count` cases, evenly over those that name properties: there a model has something to write."""
    named = [case for case in cases if isinstance(case.schema, dict) and case.schema.get("properties")]
    count = min(count, len(named))
    return [named[index * len(named) // count] for index in range(count)]


def judge_all(cases: Sequence[GrammarCase]) -> list[CaseResult]:
    """Every case's result, by the default model's vocabulary."""
    source = resolve_source(DEFAULT_MODEL)
    model, tokenizer = load_model_config(source), load_tokenizer(source)
    compiler = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    tokens = ModelTokens(tokenizer, model.vocab_size, model.eos_token_ids)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        compiler.prepare()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            return [judge(case, compiler, tokens) for case in bar.track(cases, description="judging documents")]
    finally:
        compiler.close()


def print_cases(console: Console, results: Sequence[CaseResult]) -> None:
    """A line for each file, why schemas were refused, and which documents were judged wrongly."""
    table = Table(title="JSON schemas and their documents")
    for column in ("file", "schemas", "compile", "valid accepted", "as they stand", "invalid rejected"):
        table.add_column(column, justify="left" if column == "file" else "right")
    for group in dict.fromkeys(result.group for result in results):
        of_group = [result for result in results if result.group == group]
        compiled = [result for result in of_group if not result.refused]
        num_valid = sum(result.num_valid for result in compiled)
        num_invalid = sum(result.num_invalid for result in compiled)
        table.add_row(
            group,
            str(len(of_group)),
            str(len(compiled)),
            f"{sum(result.accepted for result in compiled)} of {num_valid}",
            str(sum(result.accepted_as_written for result in compiled)),
            f"{sum(result.rejected for result in compiled)} of {num_invalid}",
        )
    console.print(table)
    seconds = sorted(result.seconds for result in results)
    console.print(f"compiling: median {seconds[len(seconds) // 2] * 1e3:.1f} ms, longest {seconds[-1] * 1e3:.0f} ms")
    reasons = Counter(result.refused.partition("cannot be used: ")[2] for result in results if result.refused)
    for reason, count in reasons.most_common(NUM_REASONS):
        console.print(f"refused {count:4}: {reason[:100]}", markup=False, highlight=False)
    wrong = [f"{result.group}, {result.name}: {words}" for result in results for words in result.wrong]
    for words in wrong[:NUM_NAMES]:
        console.print(words[:200], markup=False, highlight=False)
    if len(wrong) > NUM_NAMES:
        console.print(f"… and {len(wrong) - NUM_NAMES} more; --json writes all")


def print_texts(console: Console, results: Sequence[TextResult], machine: str) -> None:
    """How many of the model's texts are valid, and what the others are."""
    outcomes = Counter(result.outcome if result.outcome in ("valid", "length") else "wrong" for result in results)
    console.print(
        f"the model's texts under {len(results)} schemas: {outcomes['valid']} valid, {outcomes['length']} cut off at "
        f"their length, {outcomes['wrong']} wrong ({machine})",
        highlight=False,
    )
    for result in results:
        if result.outcome not in ("valid", "length"):
            console.print(f"{result.group}, {result.name}: {result.outcome}: {result.text[:200]}", markup=False)


def run_command(args: argparse.Namespace) -> int:
    check_outputs(None, args.json)
    cases = read_cases(args.folder)
    num_texts, max_tokens = args.generations, args.max_tokens
    if args.quick:
        cases, num_texts, max_tokens = cases[:QUICK_CASES], min(num_texts, QUICK_TEXTS), QUICK_TOKENS
    results = judge_all(cases)
    usable = [case for case, result in zip(cases, results, strict=True) if not result.refused]
    picked = pick(usable, num_texts)
    texts, machine = write_texts(picked, max_tokens=max_tokens, temperature=args.temperature)
    console = Console()
    print_cases(console, results)
    print_texts(console, texts, machine)
    if args.json is not None:
        write_json(
            args.json, {"cases": [asdict(result) for result in results], "texts": [asdict(text) for text in texts]}
        )
    return 0 if all(text.outcome in ("valid", "length") for text in texts) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Which JSON schemas can be followed, and are they?")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="*.jsonl files of schemas with documents")
    parser.add_argument(
        "--generations", type=int, default=100, metavar="N", help="texts the model writes (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of one text (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few schemas and short texts: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    args = parser.parse_args(arguments)
    return run_experiment(lambda: run_command(args))


if __name__ == "__main__":
    sys.exit(main())
