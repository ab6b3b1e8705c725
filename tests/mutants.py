"""Known bugs put back into the production code, one at a time: the simulation must notice each.

`python tests/mutants.py` prints the table. A mutant is one function with a piece of its source replaced; the steps are
those of fakes/workload.py until the first violation.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from fakes.workload import simulate

MAX_STEPS = 10_000
SEED = 7


#: What notices a bug: the checks, or the code's own bookkeeping where it breaks first.
NOTICED_BY = (AssertionError, IndexError)


@dataclass(frozen=True)
class Mutant:
    """`target` is "module:function" or "module:Class.method" below pageframe.runtime; `old` must be in its source."""

    name: str
    target: str
    old: str
    new: str

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The bug is in the code."""
        module_name, path = self.target.split(":")
        module = importlib.import_module(f"pageframe.runtime.{module_name}")
        *owners, name = path.split(".")
        owner = getattr(module, owners[0]) if owners else module
        original = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.target} has {source.count(self.old)} times {self.old!r}"
        scope = dict(vars(module))
        exec(f"from __future__ import annotations\n{source.replace(self.old, self.new)}", scope)
        setattr(owner, name, scope[name])
        try:
            yield
        finally:
            setattr(owner, name, original)


MUTANTS = [
    Mutant(
        "blocks are published before they are written",
        "scheduler_state:SchedulerState._run",
        "self._queues.run(request)",
        "self._queues.run(request)\n"
        "    length = np.array([len(request.context)])\n"
        "    self.blocks.publish([request], np.array([request.row]), length, self.rows.token_ids)",
    ),
    Mutant(
        "a hit takes no reference",
        "block_table:BlockTables.acquire_row",
        "self.allocator.share(shared)",
        "[self.allocator.share([b]) for b in shared if self.allocator.ref_count(b) == 0]",
    ),
    Mutant(
        "a prompt of exactly k blocks is matched whole",
        "block_manager:BlockManager.lookup",
        "(len(context) - 1) // self._block_size",
        "len(context) // self._block_size",
    ),
    Mutant(
        "a fork's shared blocks are freed twice",
        "block_table:BlockTables.release",
        "self.allocator.free(block_ids)",
        "self.allocator.free(block_ids)\n"
        "    self.allocator.free([b for b in block_ids if self.allocator.ref_count(b) > 1])",
    ),
    Mutant(
        "an entry outlives the reuse of its block",
        "block_allocator:BlockAllocator.allocate",
        "self.on_evict(block_id)",
        "pass",
    ),
    Mutant(
        "an evicted entry is found all the same",
        "prefix_cache:PrefixCache.lookup",
        "if not child.is_held:",
        "if False:",
    ),
    Mutant(
        "a preempted request loses its newest token",
        "rows:RequestRows.store",
        ": self.num_tokens[row]]",
        ": max(self.num_computed_tokens[row], self.num_tokens[row] - 1)]",
    ),
    Mutant(
        "a partial block is shared",
        "block_table:BlockTables.fork_row",
        "num_tokens // self.block_size",
        "-(-num_tokens // self.block_size)",
    ),
    Mutant(
        "the copy of a fork's partial block is left out",
        "block_manager:BlockManager.fork",
        "self._copy(BlockCopy(CopyKind.FORK, src, dst), request)",
        "pass",
    ),
    Mutant(
        "blocks of a copy in flight are not pinned",
        "block_manager:BlockManager.fork",
        "self.allocator.pin((src, dst))\n        self._pinned += (src, dst)",
        "pass",
    ),
    Mutant(
        "an abort forgets copies that are still to be made",
        "scheduler:Scheduler.abort",
        "self.num_aborts += 1",
        "self.num_aborts += 1\n    self.blocks._copies.clear()",
    ),
    Mutant(
        "copies are made in the wrong order",
        "block_manager:BlockManager.take_copies",
        "tuple(self._copies)",
        "tuple(reversed(self._copies))",
    ),
    Mutant(
        "host memory gives up what is about to be copied back",
        "host_tier:HostTier.hold",
        "self._held = frozenset(slots)",
        "self._held = frozenset()",
    ),
    Mutant(
        "a lost host copy is still believed in",
        "prefix_cache:PrefixCache._lose_host_copy",
        "entry.host_slot = NO_PLACE",
        "return",
    ),
    Mutant(
        "the key has the wrong parent",
        "prefix_cache:PrefixCache.publish",
        "key = (parent.entry_id, tokens)",
        "key = ((parent.parent or parent).entry_id, tokens)",
    ),
    Mutant(
        "the salt is dropped",
        "engine:make_salt",
        "[field.encode() for field in fields]",
        "[field.encode() for field in fields[:1]]",
    ),
    Mutant(
        "a slid context is looked up by its old positions",
        "block_manager:BlockManager.lookup",
        "context = request.context",
        "context = request.token_ids[: len(request.context)]",
    ),
    Mutant(
        "a slide forgets where the output began",
        "rows:RequestRows.load",
        "request.num_prompt_tokens - request.context_start",
        "request.num_prompt_tokens",
    ),
    Mutant(
        "blocks are freed one step late",
        "block_table:BlockTables.release",
        "self.allocator.free(block_ids)",
        'self.allocator.free(self.__dict__.pop("late", []))\n    self.__dict__["late"] = block_ids',
    ),
    Mutant(
        "copies for choices that are gone keep their pins",
        "block_manager:BlockManager.release",
        "if self._pinned:",
        "if False:",
    ),
    Mutant(
        "a reset leaves what is in host memory",
        "prefix_cache:PrefixCache.reset",
        "self.host_tier.clear()",
        "pass",
    ),
    Mutant(
        "evicted entries are remembered for ever",
        "prefix_cache:PrefixCache._remember_evicted",
        "while self._num_evicted > self._keep_evicted and self._evicted_leaves:",
        "while False:",
    ),
    Mutant(
        "the window gives back one block too many",
        "block_manager:BlockManager.release_behind_window",
        "num_computed - self._window + 1, 0) // self._block_size",
        "num_computed - self._window + 1, 0) // self._block_size + (num_computed > self._window)",
    ),
    Mutant(
        "after a failure its blocks are found again",
        "prefix_cache:PrefixCache.forget_blocks",
        "for block_id in block_ids:",
        "for block_id in ():",
    ),
    Mutant(
        "after a failure the device keeps its old tables",
        "block_manager:BlockManager.distrust",
        "self.tables.repeat_updates()",
        "pass",
    ),
    Mutant(
        "all choices draw with the first one's seed",
        "batch:_seeds",
        "[follower.seed for follower in followers]",
        "[plan.requests[position].seed for follower in followers]",
    ),
    Mutant(
        "a row that is given back is still published",
        "block_manager:BlockManager.release",
        "self._num_published[row] = 0",
        "pass",
    ),
    Mutant(
        "an earlier request gives way to a later one",
        "scheduler_state:SchedulerState._preempt_last",
        "self._queues.running[-1]",
        "self._queues.running[0]",
    ),
    Mutant(
        "a leader's end takes its followers along",
        "scheduler_state:SchedulerState._end",
        "if request.followers and reason is not FinishReason.ERROR:",
        "if False:",
    ),
    Mutant(
        "a private duplicate takes the place of the indexed block",
        "prefix_cache:PrefixCache.publish",
        "elif entry.block_id != NO_PLACE:\n        return entry",
        "elif entry.block_id != NO_PLACE:\n"
        "        del self._by_block[entry.block_id]\n"
        "        entry.block_id = NO_PLACE",
    ),
]


def hunt(mutant: Mutant, max_steps: int = MAX_STEPS) -> tuple[int, str] | None:
    """Steps until the first violation, and its words; None where none was found.

    Any other error is the mutant's own and comes through.
    """
    steps = [0]
    logging.disable(logging.CRITICAL)
    try:
        with mutant.alive():
            simulate(SEED, max_steps, on_step=steps.append)
    except NOTICED_BY as error:
        return steps[-1], f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        logging.disable(logging.NOTSET)
    return None


def main() -> int:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-steps", type=int, default=MAX_STEPS, help="most steps for each (default: %(default)s)")
    args = parser.parse_args()
    table = Table("mutant", "steps", "caught by")
    missed = 0
    for mutant in track(MUTANTS, "hunting", console=Console(stderr=True), transient=True):
        caught = hunt(mutant, args.max_steps)
        missed += caught is None
        table.add_row(mutant.name, *(("-", "NOT CAUGHT") if caught is None else (f"{caught[0]:,}", caught[1])))
    console = Console()
    console.print(table)
    console.print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} caught within {args.max_steps:,} steps")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
