"""One request of the load, from its send to its end, recorded. Nothing is retried here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from pageframe.benchmarks.client.record import Failure, Outcome, RequestRecord
from pageframe.benchmarks.client.server import Server, error_message, network_message
from pageframe.benchmarks.client.sse import SseParser
from pageframe.benchmarks.client.stream import AnswerStream

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready to be sent.

    Args:
        body: the encoded JSON.
        known_prompt_tokens: its prompt's length, where that was measured.
        intended_s: its arrival in an open loop; None in a closed loop.
        cancel_after: close the connection once this many output tokens were read (0: as soon as the answer begins);
            None: read to the end.
    """

    index: int
    body: bytes
    known_prompt_tokens: int | None = None
    intended_s: float | None = None
    cancel_after: int | None = None


@dataclass(slots=True)
class LiveCounts:
    """What a progress display shows while the load runs."""

    sent: int = 0
    running: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the requests of one load are sent: to whom, on which clock, counted where."""

    server: Server
    path: str
    clock: Clock
    counts: LiveCounts

    async def run(self, job: Job, record: RequestRecord) -> None:
        """Send `job` and fill in `record`. Failures of the server or the network end up in the record.

        Raises:
            CancelledError: the load was interrupted; the record says so.
        """
        counts = self.counts
        counts.sent += 1
        counts.running += 1
        record.sent_s = self.clock()
        try:
            await self._talk(job, record)
        except asyncio.CancelledError:
            record.outcome = Outcome.INTERRUPTED
            raise
        finally:
            if record.end_s is None or record.outcome is not Outcome.OK:
                record.end_s = self.clock()
            counts.running -= 1
            counts.ended += 1
            counts.failed += record.outcome is Outcome.FAILED

    async def _talk(self, job: Job, record: RequestRecord) -> None:
        stream = AnswerStream(record)
        try:
            failure = await self._post(job, record, stream)
        except TimeoutError:
            failure = Failure("timeout", f"no end within {self.server.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            failure = Failure("cannot connect", network_message(error))
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure("connection lost", network_message(error))
        if record.outcome is Outcome.CANCELLED:
            return
        if failure is not None and not stream.done:  # after [DONE] only the connection's own end is outstanding
            record.outcome = Outcome.FAILED
            record.failure = Failure(failure.kind, self.server.redact(failure.message))
        else:
            record.outcome = Outcome.OK

    async def _post(self, job: Job, record: RequestRecord, stream: AnswerStream) -> Failure | None:
        server = self.server
        timeout = aiohttp.ClientTimeout(total=server.timeout_s)
        async with server.session.post(
            server.base_url + self.path,
            data=job.body,
            headers=server.headers(),
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                return await _refusal(response)
            if job.cancel_after == 0 or await self._read(response, record, stream, job.cancel_after):
                record.outcome = Outcome.CANCELLED
                response.close()
                return None
            if stream.failure is None and not stream.complete:
                what = f"the answer ({response.content_type}) ended without a finish reason and without [DONE]"
                return Failure("incomplete answer", what)
            return stream.failure

    async def _read(
        self, response: aiohttp.ClientResponse, record: RequestRecord, stream: AnswerStream, cancel_after: int | None
    ) -> bool:
        """Read the answer to its end; True: stopped early, because `cancel_after` tokens were read."""
        parser = SseParser()
        async for received in response.content.iter_any():
            now_s = self.clock()
            record.end_s = now_s
            seen = stream.tokens_seen
            for event in parser.feed(received):
                stream.take(event, now_s)
            self.counts.tokens += stream.tokens_seen - seen
            if stream.failure is not None:
                return False  # leaving closes the connection, which a server may keep open after an error
            if cancel_after is not None and stream.tokens_seen >= cancel_after and not stream.complete:
                return True
        for event in parser.close():
            stream.take(event, self.clock())
        return False


async def _refusal(response: aiohttp.ClientResponse) -> Failure:
    """The failure that a status other than 200 means, with the server's own words."""
    text = (await response.read()).decode("utf-8", errors="replace")
    try:
        message = error_message(json.loads(text))
    except (ValueError, RecursionError):
        message = ""
    return Failure(f"HTTP {response.status}", message or text or "no message")
