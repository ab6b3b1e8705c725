"""`pageframe chat`: a conversation with a server in the terminal, over /v1/chat/completions.

Speaks HTTP only, so any server with OpenAI's routes will do; it knows no model, template or tokenizer. Lines typed
are kept for the arrow keys while it runs and written nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category

from rich.console import Console
from rich.text import Text

from pageframe.api.terminal_http import (
    DEFAULT_URL,
    Json,
    ServerError,
    fetch_json,
    full_path,
    key_header,
    open_connection,
    print_error,
    refusal,
    server_url,
    unreachable,
)
from pageframe.api.terminal_server import SERVE_COMMAND, OwnServer, is_there, own_server, wait_while_starting

CONTEXT_FULL = "context_length_exceeded"
#: How long after a broken connection the server's own end may be noticed.
ENDING_SECONDS = 1.0
HELP = """\
/system TEXT  tell the model how to behave; /system alone shows what it was told
/clear        forget the conversation, keep what /system said
/help         this
/exit         end; so do Ctrl-D and, at the prompt, Ctrl-C
Ctrl-C while an answer comes stops the answer."""


class ServerEndedError(ServerError):
    """The server that was started for the conversation has ended."""


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come.

    Args:
        usage: the server's counts, {} until they come.
        first, last: when the first and the last piece of text came, in seconds from the question.
        stopped: Ctrl-C ended it.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Json | None = None
    first: float | None = None
    last: float = 0.0
    stopped: bool = False

    def take(self, chunk: Json, seconds: float) -> str:
        """Add one chunk of the stream; returns its text."""
        self.usage = chunk.get("usage") or self.usage
        piece = ""
        for choice in chunk.get("choices", []):
            piece += choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if piece:
            self.first = seconds if self.first is None else self.first
            self.last = seconds
            self.text += piece
        return piece

    def summary(self) -> str:
        """Counts and speed in words."""
        facts = ["stopped"] if self.stopped else []
        if self.finish_reason == "length":
            facts.append("cut off by max_tokens or the end of the context")
        if self.usage:
            tokens = self.usage["completion_tokens"]
            facts.append(f"{tokens:,} tokens")
            if self.first is not None and self.last > self.first and tokens > 1:
                facts.append(f"{(tokens - 1) / (self.last - self.first):,.1f} tokens/s")
            facts.append(f"prompt {self.usage['prompt_tokens']:,} tokens")
        if self.first is not None:
            facts.append(f"first text after {self.first:.2f} s")
        return ", ".join(facts)


class Conversation:
    """Questions and answers so far, and how the next answer is asked for.

    Args:
        settings: fields of the request beside the messages.
        clock: seconds; only differences count.
    """

    def __init__(
        self, url: str, settings: Json, system: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self.settings = settings
        self.system = system
        self.turns: list[Json] = []
        self._clock = clock

    def ask(self, question: str, show: Callable[[str], None]) -> Answer:
        """Stream one answer to `show`, piece by piece. Ctrl-C stops it, and what has come is kept as the answer.

        Raises:
            ServerError: there is no answer; the question is forgotten.
        """
        turn = {"role": "user", "content": question}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            **self.settings,
            "messages": [*system, *self.turns, turn],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        start = self._clock()
        try:
            with contextlib.closing(stream_chunks(self.url, body)) as chunks:
                for chunk in chunks:
                    piece = answer.take(chunk, self._clock() - start)
                    if piece:
                        show(piece)
        except KeyboardInterrupt:
            answer.stopped = True
        if answer.text:  # many chat templates refuse two questions in a row
            self.turns += [turn, {"role": "assistant", "content": answer.text}]
        return answer


def stream_chunks(url: str, body: Json) -> Generator[Json, None, None]:
    """POST a chat request and yield its stream's JSON objects. Closing the iterator closes the connection.

    Raises:
        ServerError: the server refuses, cannot be reached, sends an error or breaks off.
    """
    connection = open_connection(url)
    with contextlib.closing(connection):
        try:
            connection.connect()
            # Only connecting has a limit: a request may wait long for its turn, and Ctrl-C ends the wait.
            connection.sock.settimeout(None)
            headers = {"content-type": "application/json", **key_header()}
            connection.request("POST", full_path(url, "/v1/chat/completions"), json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(url, error) from error
        with contextlib.closing(response):
            try:
                if response.status != http.client.OK:
                    raise refusal(response.status, response.read())
                for line in response:
                    chunk = _read_event(line)
                    if chunk == {}:
                        return
                    if chunk is not None:
                        yield chunk
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the answer broke off: {error or type(error).__name__}") from error
            raise ServerError("the answer broke off before its end")


def _read_event(line: bytes) -> Json | None:
    """The JSON object of one line of a stream; {} at its end, None for a line without one."""
    if not line.startswith(b"data:"):
        return None
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return {}
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError(f"the stream holds something that is no JSON object: {data[:80]!r}")
    if "error" in chunk:
        raise refusal(http.client.OK, data)
    return chunk


class Terminal:
    """The conversation as a person sees it: prompt, answers as they come, commands.

    Args:
        name: what the model is called.
        own: the server that was started for this conversation, if one was.
    """

    def __init__(self, conversation: Conversation, console: Console, name: str, own: OwnServer | None) -> None:
        self._conversation = conversation
        self._console = console
        self._name = name
        self._own = own
        self._in_line = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/clear": self._clear,
            "/system": self._system,
        }

    def talk(self) -> int:
        """Converse until /exit, Ctrl-D or Ctrl-C; the exit status."""
        read = _line_reader(self._console)
        self._console.print(
            Text.assemble((self._name, "bold"), (f" at {self._conversation.url}. /help lists commands.", "dim"))
        )
        try:
            while (line := read().strip()) != "/exit":
                command, _, rest = line.partition(" ")
                if not line:
                    continue
                if not command.startswith("/"):
                    self._answer(line)
                elif command in self._commands:
                    self._commands[command](rest.strip())
                else:
                    self._say(f"there is no {command}; /help lists the commands", "yellow")
        except (EOFError, KeyboardInterrupt):
            self._console.print()
        return 0

    def ask(self, question: str) -> Answer:
        """Stream one answer.

        Raises:
            ServerError: there is none; `status` is 0 where the server may be gone.
            ServerEndedError: nor will there be one: the conversation's own server has ended.
        """
        try:
            return self._conversation.ask(question, self.show)
        except ServerError as error:
            if error.status == 0 and self._own is not None and self._own.ends_within(ENDING_SECONDS):
                raise ServerEndedError(self._own.death_note()) from error
            raise

    def _answer(self, question: str) -> None:
        """Stream one answer; a refusal is shown and the conversation goes on."""
        try:
            answer = self.ask(question)
        except ServerEndedError:
            raise
        except ServerError as error:
            if self._in_line:
                self.show("\n")
            self._say(str(error), "red")
            if error.code == CONTEXT_FULL:
                self._say("the conversation no longer fits in the model's context; /clear starts a new one", "yellow")
            return
        if self._in_line:
            self.show("\n")
        self._say(answer.summary() + "\n")

    def show(self, piece: str) -> None:
        """Write a piece of an answer as it is, save that a terminal gets no control characters from a model.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        if self._console.is_terminal:
            piece = "".join(character for character in piece if character in "\n\t" or category(character) != "Cc")
        self._console.file.write(piece)  # rich would expand tabs
        self._console.file.flush()
        self._in_line = not piece.endswith("\n")

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(text, style))

    def _clear(self, rest: str) -> None:
        self._conversation.turns.clear()
        self._say("the conversation is forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        self._say(f"system: {self._conversation.system or 'nothing'}")


def _line_reader(console: Console) -> Callable[[], str]:
    """A function that reads one line, with a prompt and editing where a person types."""
    if not sys.stdin.isatty():
        return input
    try:
        import readline  # noqa: F401 - importing it gives input() editing and history
    except ImportError:
        return lambda: input("> ")
    if console.color_system is None:
        return lambda: input("> ")
    # The marks tell readline that what is between them takes no columns.
    return lambda: input("\001\033[1;36m\002>\001\033[0m\002 ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="answer this alone, on stdout, and end")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", type=server_url, help=f"the server; default: {DEFAULT_URL}, or one of its own where none answers there"
    )
    where.add_argument("--serve-model", metavar="PATH", help="start a server of its own, with this as its --model")
    parser.add_argument("--model", metavar="NAME", help="the model's name in the request; default: the first served")
    parser.add_argument("--system", metavar="TEXT", help="how the model shall behave")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 always takes the likeliest token")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--seed", type=int, metavar="S", help="makes answers repeatable")


def run(
    args: argparse.Namespace, *, default_url: str = DEFAULT_URL, serve_command: Sequence[str] = SERVE_COMMAND
) -> int:
    """Converse, or answer once; 1 and one line on stderr where no answer can be had."""
    status = Console(stderr=True)
    try:
        with contextlib.ExitStack() as stack:
            url, own = args.url, None
            if url is None and args.serve_model is None and is_there(default_url):
                url = default_url
            if url is None:
                own = stack.enter_context(own_server(status, args.serve_model, serve_command))
                url = own.url
            wait_while_starting(url, status)
            name = args.model or _first_model(url)
            conversation = Conversation(url, _settings(args, name), args.system)
            terminal = Terminal(conversation, Console(highlight=False), name, own)
            if args.message is None:
                return terminal.talk()
            return _answer_once(terminal, args.message, status)
    except ServerError as error:
        print_error(str(error))
        return 1
    except BrokenPipeError:  # `| head` has what it wanted; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _answer_once(terminal: Terminal, message: str, status: Console) -> int:
    answer = terminal.ask(message)
    terminal.show("\n")
    if answer.stopped:
        raise KeyboardInterrupt
    if status.is_terminal:
        status.print(Text(answer.summary(), "dim"))
    return 0


def _settings(args: argparse.Namespace, name: str) -> Json:
    values = {"model": name, "temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed}
    return {key: value for key, value in values.items() if value is not None}


def _first_model(url: str) -> str:
    """The name of the first model that the server serves.

    Raises:
        ServerError: it cannot be reached or lists none.
    """
    models: Any = fetch_json(url, "/v1/models").get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise ServerError(f"{url}/v1/models lists no model")
    return str(models[0]["id"])
