"""Whether an engine could use a grammar, found out before a request is sent: a client gets the compiler's own reason.

The compiler runs in a child process (`gateway.grammar_process`), because hostile grammars hang it or end it. The child starts
with the first request that needs it, takes about 85 MB, and a killed one is replaced with the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import signal
from collections import OrderedDict

from cores.launch.child_process import ChildProcess
from cores.sampling_params import StructuredOutputs
from gateway.engine_client import ModelConfig
from gateway.errors import EngineDeadError, InvalidRequestError, OverloadedError

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 5.0  # the largest schemas that we take need 1 s; most need 1 ms
CLOCK_LIMIT_S = 60.0  # against a child that does not even run
MAX_WAITING = 64
MAX_VERDICTS = 1024


class GrammarChecker:
    """For one model. One grammar at a time; verdicts are remembered."""

    def __init__(self, model: ModelConfig, *, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._task = {
            "model": model.path,
            "vocab_size": model.vocab_size,
            "eos_token_ids": model.eos_token_ids,
            "cpu_limit_s": cpu_limit_s,
        }
        self._cpu_limit_s = cpu_limit_s
        self._child: ChildProcess | None = None
        self._turn = asyncio.Lock()
        self._judging: set[asyncio.Task[str]] = set()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # by grammar: why not, empty for a good one

    async def check(self, wanted: StructuredOutputs) -> None:
        """Raises `InvalidRequestError` with the reason, `OverloadedError` when too many wait for their verdict, and
        `EngineDeadError` when it is closed meanwhile."""
        text = f"{wanted.kind.value}:{wanted.reasoning}:{wanted.spec}"
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._wait_for_verdict(key, wanted)
        self._verdicts.move_to_end(key)
        if verdict:
            raise InvalidRequestError(f"{wanted.param}: {verdict}", wanted.param)

    async def _wait_for_verdict(self, key: bytes, wanted: StructuredOutputs) -> str:
        if len(self._judging) >= MAX_WAITING:
            raise OverloadedError(f"{MAX_WAITING} grammars wait to be compiled")
        task = asyncio.create_task(self._judge(key, wanted))
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)
        try:
            # A client that leaves must not tear the dialogue with the child apart.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, not by our caller
                raise EngineDeadError("the engine client was shut down") from None
            raise

    async def _judge(self, key: bytes, wanted: StructuredOutputs) -> str:
        async with self._turn:
            if key not in self._verdicts:  # else somebody else has asked meanwhile
                self._verdicts[key] = await self._ask(wanted)
                if len(self._verdicts) > MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
            return self._verdicts[key]

    async def _ask(self, wanted: StructuredOutputs) -> str:
        if self._child is None:
            self._child = await ChildProcess.start("grammars", "gateway.grammar_process", self._task, answers=True)
        child = self._child
        answer = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOCK_LIMIT_S):
                reasoning = None if wanted.reasoning is None else dataclasses.astuple(wanted.reasoning)
                await child.write_line(json.dumps([wanted.kind.value, wanted.spec, reasoning]))
                answer = await child.read_line()
        if answer:
            return str(json.loads(answer))
        self._child = None
        await child.end(1.0)
        logger.warning("%s", f"the grammar compiler died of a {wanted.kind.value}: {child.describe_exit()}")
        return self._why(wanted, child.returncode)

    def _why(self, wanted: StructuredOutputs, code: int | None) -> str:
        match -code if code is not None else None:
            case signal.SIGPROF | signal.SIGKILL:
                return f"this {wanted.kind.value} takes more than {self._cpu_limit_s:g} s to compile"
            case signal.SIGSEGV | signal.SIGABRT | signal.SIGBUS:
                return f"this {wanted.kind.value} takes too much memory, or is nested too deeply, to compile"
        raise RuntimeError("the grammar compiler does not start: see its last lines in the log")

    async def close(self) -> None:
        for task in self._judging:  # or the next one would start another child
            task.cancel()
        await asyncio.gather(*self._judging, return_exceptions=True)
        if self._child is not None:
            await self._child.kill()
            self._child = None
