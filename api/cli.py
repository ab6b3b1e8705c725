"""The `pageframe` command. Each subcommand's module is imported when it is called, so that --help is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pageframe.api.config import ServerConfig
from pageframe.api.flags import add_flags, read_flags
from pageframe.runtime.config import EngineConfig
from pageframe.runtime.errors import StartupError


class Command(NamedTuple):
    """A subcommand whose module has add_arguments(parser) and run(args) -> exit status."""

    help: str
    module: str


COMMANDS = {
    "chat": Command("talk to a model in the terminal", "pageframe.api.terminal_chat"),
    "generate": Command("answer a file of requests without a server", "pageframe.api.batch_command"),
    "explain": Command("tell what happened to a request, in sentences", "pageframe.api.terminal_explain"),
    "inspect": Command("draw a running server's pool and block tables", "pageframe.api.terminal_inspect"),
    "plan": Command("how much memory the KV cache takes here", "pageframe.api.plan_command"),
    "top": Command("watch a running server in the terminal, as htop does", "pageframe.api.terminal_top"),
}

#: What stands behind `pageframe bench`.
BENCHES = {
    "serve": Command(
        "drive any server that speaks OpenAI's HTTP, and measure what its clients see",
        "pageframe.benchmarks.client.command",
    ),
    "kv-cache": Command(
        "what a KV cache saves: none, one grown by concatenation, one reserved whole, and a paged one",
        "pageframe.benchmarks.experiments.kv_cache",
    ),
    "phases": Command(
        "prefill and decode apart, against prompt length and context, beside the machine's floor",
        "pageframe.benchmarks.experiments.phases",
    ),
    "batching": Command(
        "what continuous batching, chunked prefill, the prefix cache and the block size change",
        "pageframe.benchmarks.experiments.batching",
    ),
    "fit": Command(
        "how many requests of a trace fit in one pool, paged and reserved whole",
        "pageframe.benchmarks.experiments.fit",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments[:2])
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except StartupError as error:
        print(f"pageframe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser(named: Sequence[str]) -> argparse.ArgumentParser:
    """The parser. Only the commands in `named` get their flags: the others' modules are not imported."""
    parser = argparse.ArgumentParser(
        prog="pageframe", description="Serve language models from a paged KV cache with continuous batching."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model over HTTP, with OpenAI's routes."
    )
    add_flags(serve, EngineConfig)
    add_flags(serve, ServerConfig)
    serve.set_defaults(run=_serve)
    _add_commands(commands, COMMANDS, named[:1])
    bench = commands.add_parser("bench", help="load-test a server, or measure what its parts are worth")
    benches = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_commands(benches, BENCHES, named[1:2] if named[:1] == ["bench"] else [])
    return parser


def _add_commands(
    group: argparse._SubParsersAction[argparse.ArgumentParser], commands: Mapping[str, Command], named: Sequence[str]
) -> None:
    for name, command in commands.items():
        parser = group.add_parser(name, help=command.help, description=_sentence(command.help))
        if name in named:
            module = importlib.import_module(command.module)
            module.add_arguments(parser)
            parser.set_defaults(run=module.run)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _serve(args: argparse.Namespace) -> int:
    from pageframe.api.launch import run_server

    return run_server(read_flags(args, EngineConfig), read_flags(args, ServerConfig))


if __name__ == "__main__":
    sys.exit(main())
