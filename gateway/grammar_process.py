"""Compiles grammars for a front end: one JSON line in, one out. Started by `GrammarChecker`, and made to be killed.

What it compiles may run for ever, overflow the stack or eat all memory (`cores.structured_outputs`). Each of these ends this
process with a signal of its own, and the front end knows what to say to the client: `GrammarChecker.why`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from typing import Any

from cores.launch.child_process import read_task
from cores.sampling_params import Reasoning, StructuredOutputKind, StructuredOutputs
from cores.structured_outputs import GrammarError, compile_grammar, load_grammar_tokenizer

MEMORY_LIMIT_BYTES = 256 * 1024 * 1024  # beside the tokenizer
STACK_BYTES = 6 * 1024 * 1024  # a tenth of what the engines have
PAGE_BYTES = resource.getpagesize()


def main() -> int:
    task = read_task()
    try:
        tokenizer = load_grammar_tokenizer(task["model"], task["vocab_size"], tuple(task["eos_token_ids"]))
    except GrammarError as error:
        print(error, file=sys.stderr)
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_bytes = _address_space_bytes() + STACK_BYTES + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(tokenizer, float(task["cpu_limit_s"])))
    thread.start()
    thread.join()
    return 0


def _answer_all(tokenizer: Any, cpu_limit_s: float) -> None:
    """Until the end of stdin, which is the parent's."""
    for line in sys.stdin.buffer:
        kind, spec, reasoning = json.loads(line)
        wanted = StructuredOutputs(
            StructuredOutputKind(kind), spec, reasoning=None if reasoning is None else Reasoning(*reasoning)
        )
        # Of CPU time, not of the clock: how busy the machine is decides nothing. Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        reason = ""
        try:
            compile_grammar(tokenizer, wanted)
        except GrammarError as error:
            reason = str(error)
        except MemoryError:
            reason = "it takes too much memory to compile"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(reason), flush=True)


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
