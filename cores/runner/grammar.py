"""Structured output in the torch engine: which tokens each request may choose next, worked out while the model computes.

Theory of operation
-------------------
A request's grammar is compiled when the request is first in a batch, in a thread of its own, and kept with the request: what
the request has generated so far, here or elsewhere, is replayed into it. `begin`, before the model runs, hands the grammars of
the step to a second thread, which computes their masks beside the model (llguidance holds no lock of the interpreter);
`StepGrammars.collect`, after it, has the masks for the sampler, and `advance` gives the chosen tokens to the grammars.

Requests with equal grammars are copies of one, and share what its lexer has learnt. Its states are counted and limited, so a
copy that fails is made once more by itself before the request is: others may have used them up.

A grammar whose compilation outlasts the step defers its request: no token is chosen for it, and the scheduler offers its last
position again in the next step. So nobody waits for another's grammar. A request is over once its grammar can take no more.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from llguidance import LLMatcher, LLTokenizer

from cores.request import Request
from cores.runner.interface import ModelRunnerOutput, SchedulerOutput
from cores.runner.sampler import TokenMasks
from cores.sampling_params import StructuredOutputs
from cores.structured_outputs import GrammarError, check_matcher, compile_grammar

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 60.0  # no front end of ours sends a grammar that takes longer than a few seconds
# When nothing but deferred requests would run, a step waits this long for the first of their grammars instead of spinning.
DEFERRED_STEP_S = 0.05
MAX_SHARED = 16  # grammars kept for the next request; a hostile one may hold 200 MB
MAX_COPIES = 64  # of one: then it is compiled anew, and begins with an empty lexer
# Ten times what the front ends' check has (`gateway.grammar_process`): no grammar that got by there may overflow it here.
STACK_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


class WorkerThread:
    """Does jobs in order. A daemon: native code that never returns must not keep the process from its end."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        previous = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        finally:
            threading.stack_size(previous)

    def submit(self, do: Callable[[], T]) -> Future[T]:
        job = _Job(do)
        self._jobs.put(job)  # type: ignore[arg-type]  # each job keeps its own type to itself
        return job.result

    def stop(self) -> None:
        """After the jobs that wait already."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class _Job(Generic[T]):
    def __init__(self, do: Callable[[], T]) -> None:
        self._do = do
        self.result: Future[T] = Future()

    def run(self) -> None:
        try:
            self.result.set_result(self._do())
        except BaseException as error:  # whoever waits for the result is told
            self.result.set_exception(error)


@dataclass(slots=True, eq=False)
class SharedGrammar:
    """What the requests with one grammar copy."""

    compiled: Future[LLMatcher]
    num_copies: int = 0
    has_failed: bool = False

    @property
    def is_spent(self) -> bool:
        return self.has_failed or self.num_copies >= MAX_COPIES


@dataclass(slots=True)
class RequestGrammar:
    """`Request.runner_state` of a request with structured output."""

    compiled: Future[LLMatcher]
    begun_s: float
    shared: SharedGrammar | None  # None: it is no copy
    is_void: bool = False  # to be made anew, by itself

    def fail(self) -> bool:
        """Whether to try once more."""
        if self.shared is None:
            return False
        self.shared.has_failed = self.is_void = True
        return True

    def is_ready(self) -> bool:
        return self.compiled.done()

    def next_mask(self) -> bytes:
        """One bit for each token. Raises `GrammarError`. Cheap the second time."""
        matcher = self.compiled.result()
        mask = matcher.compute_bitmask()
        check_matcher(matcher)
        return mask


class Grammars:
    """All grammars of one engine. Without a `tokenizer` that fits, requests that need one fail with `why_not`."""

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        why_not: str = "",
        *,
        compile_: Callable[[LLTokenizer, StructuredOutputs], LLMatcher] = compile_grammar,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._why_not = why_not
        self._compile_one = compile_
        self._clock = clock
        self._shared: OrderedDict[StructuredOutputs, SharedGrammar] = OrderedDict()  # the last used at the end
        self._compiler = WorkerThread("grammar-compiler")
        self._masker = WorkerThread("grammar-masks")

    def close(self) -> None:
        self._compiler.stop()
        self._masker.stop()

    def begin(self, batch: SchedulerOutput) -> StepGrammars:
        """Call it before the model computes the batch."""
        step = StepGrammars(self._clock)
        index = -1  # among those that sample
        for scheduled in batch.scheduled:
            index += scheduled.samples
            request = scheduled.request
            if request.sampling_params.structured_outputs is not None:
                grammar = self._grammar_of(request)
                if scheduled.samples:
                    step.add(index, grammar)
        step.num_sampling = index + 1
        step.start(self._masker)
        return step

    def _grammar_of(self, request: Request) -> RequestGrammar:
        grammar, wanted = request.runner_state, request.sampling_params.structured_outputs
        assert wanted is not None
        if isinstance(grammar, RequestGrammar) and not grammar.is_void:
            return grammar
        shared = self._share(wanted) if grammar is None else None
        generated = request.token_ids[request.num_original_prompt_tokens :]
        compiled = self._compiler.submit(lambda: self._begin_request(wanted, shared, generated))
        grammar = request.runner_state = RequestGrammar(compiled, self._clock(), shared)
        return grammar

    def _share(self, wanted: StructuredOutputs) -> SharedGrammar:
        shared = self._shared.pop(wanted, None)
        if shared is None or shared.is_spent:
            shared = SharedGrammar(self._compiler.submit(lambda: self._compile(wanted)))
        self._shared[wanted] = shared
        shared.num_copies += 1
        if len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)
        return shared

    # --- in the compiler's thread ---

    def _begin_request(self, wanted: StructuredOutputs, shared: SharedGrammar | None, generated: Sequence[int]) -> LLMatcher:
        # The shared one was compiled by an earlier job of this thread: nothing is waited for here.
        matcher = self._compile(wanted) if shared is None else shared.compiled.result().deep_copy()
        if generated and not matcher.consume_tokens(list(generated)):
            raise GrammarError("the tokens generated so far do not follow the grammar")
        matcher.compute_bitmask()  # kept in the matcher: `collect` finds it there
        return matcher

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarError(self._why_not)
        try:
            return self._compile_one(self._tokenizer, wanted)
        except GrammarError:
            raise
        except Exception as error:  # whatever a stranger's grammar does to the compiler, it is not the engine's death
            logger.exception("a grammar failed to compile in an unforeseen way")
            raise GrammarError(f"{type(error).__name__}: {error}") from error


@dataclass(slots=True)
class StepGrammars:
    """The grammars of one step, by the index of their request among those that sample."""

    clock: Callable[[], float]
    num_sampling: int = 0
    grammars: dict[int, RequestGrammar] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    _ready: list[int] = field(default_factory=list)
    _masks: Future[dict[int, bytes | GrammarError]] | None = None

    def add(self, index: int, grammar: RequestGrammar) -> None:
        self.grammars[index] = grammar

    def start(self, worker: WorkerThread) -> None:
        """Begins with the masks of those that are compiled."""
        self._ready = [index for index, grammar in self.grammars.items() if grammar.is_ready()]
        if self._ready:
            self._masks = worker.submit(lambda: self._compute(self._ready))

    def _compute(self, indexes: Sequence[int]) -> dict[int, bytes | GrammarError]:
        masks: dict[int, bytes | GrammarError] = {}
        for index in indexes:
            try:
                masks[index] = self.grammars[index].next_mask()
            except GrammarError as error:
                masks[index] = error
        return masks

    def collect(self) -> TokenMasks | None:
        """What the sampler needs, once the model has computed. None: nothing is constrained in this step."""
        if not self.grammars:
            return None
        masks = {} if self._masks is None else self._masks.result()
        late = self.grammars.keys() - masks.keys()
        if len(late) == self.num_sampling:
            wait([self.grammars[index].compiled for index in late], DEFERRED_STEP_S, FIRST_COMPLETED)
        compiled = sorted(index for index in late if self.grammars[index].is_ready())
        masks |= self._compute(compiled)
        self._give_up_or_defer(late.difference(compiled))
        for index, mask in masks.items():
            if isinstance(mask, GrammarError):
                self._fail(index, mask)
        rows = {index: mask for index, mask in masks.items() if not isinstance(mask, GrammarError)}
        if not rows:
            return None
        bits = torch.frombuffer(bytearray(b"".join(rows.values())), dtype=torch.uint8).view(len(rows), -1)
        return TokenMasks(list(rows), bits)

    def _give_up_or_defer(self, uncompiled: set[int]) -> None:
        now = self.clock()
        for index in uncompiled:
            if now - self.grammars[index].begun_s > COMPILE_TIMEOUT_S:
                self.errors[index] = f"structured_outputs: not compiled after {COMPILE_TIMEOUT_S:.0f} s"
            else:
                self.deferred.add(index)

    def _fail(self, index: int, error: GrammarError) -> None:
        if self.grammars[index].fail():
            self.deferred.add(index)
        else:
            self.errors[index] = f"structured_outputs: {error}"

    def advance(self, output: ModelRunnerOutput) -> None:
        """Gives each grammar its token; writes into `output` who failed, who is deferred and whose grammar is at its end."""
        output.errors |= self.errors
        output.deferred = frozenset(self.deferred)
        for index, grammar in self.grammars.items():
            if index in output.errors or index in self.deferred:
                continue
            matcher = grammar.compiled.result()
            if not matcher.consume_token(output.token_ids[index]):
                if not grammar.fail():  # else the token counts, and is replayed
                    output.errors[index] = f"structured_outputs: {matcher.get_error()}"
            elif matcher.is_stopped():
                output.completed.add(index)
