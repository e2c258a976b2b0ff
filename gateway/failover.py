"""What becomes of the requests of a dead rank: each goes on elsewhere, from the last token that was accepted from it.

Theory of operation
-------------------
Sampling is a pure function of (seed, position, logits), and every request carries its seed and where its original prompt ended.
So a request goes on exactly as it would have, if another rank is given the prompt and the tokens so far as one prompt. Only the
engine's side of it is new: handle, text, stop buffer, log-probabilities and counts stay where they are.

When no rank can take it now, but one will, it waits, for a bounded time; so do new requests then. A request that was there at
too many deaths may be their cause, and fails alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from gateway.core_client.base import EngineCoreClient, SentRequest
from gateway.errors import EngineDeadError, GatewayError, OverloadedError
from gateway.output_processor import OutputProcessor

MAX_MOVES = 2


class Failover:
    """Moves requests between ranks on behalf of the output handler."""

    def __init__(
        self,
        client: EngineCoreClient,
        outputs: OutputProcessor,
        clock: Callable[[], float],
        *,
        is_enabled: bool,
        max_wait_s: float,
    ) -> None:
        self.num_moved = 0
        self._client = client
        self._outputs = outputs
        self._clock = clock
        self._is_enabled = is_enabled
        self._max_wait_s = max_wait_s
        self._waiting: dict[int, _Waiting] = {}  # by handle, in the order of their coming

    @property
    def num_waiting(self) -> int:
        """Sequences that no rank has at the moment."""
        return len(self._waiting)

    @property
    def waiting_handles(self) -> Collection[int]:
        return self._waiting.keys()

    def send(self, sent: SentRequest) -> None:
        """A new request: to a rank, or to wait for one that will take it. Raises what the client does where there is none."""
        try:
            rank_id = self._client.add_request(sent)
        except (OverloadedError, EngineDeadError) as error:
            # A rank that cannot be reached has died a moment ago: what follows its death will send the request elsewhere.
            will_be_sent = isinstance(error, EngineDeadError) or self._client.awaits_restart
            if not (self._is_enabled and will_be_sent) or self._client.failure is not None:
                raise
            self._waiting[sent.request.handle] = _Waiting(sent, self._clock())
        else:
            if rank_id is not None:  # else `on_bound` will say
                self._outputs.set_rank(sent.request.handle, rank_id.rank, self._clock())

    def drop(self, handles: Iterable[int]) -> None:
        """These have ended: clients come and go while no rank does, and must leave nothing here."""
        for handle in handles:
            self._waiting.pop(handle, None)

    def on_death(self, held: Sequence[SentRequest], *, is_blameless: bool = False) -> dict[int, str | None]:
        """Moves what the dead rank held. The handles that cannot go on, each with the reason if it is the request's own.
        `is_blameless`: no request can be the cause of that death."""
        lost: dict[int, str | None] = {}
        for sent in held:
            accepted = self._outputs.accepted_token_ids(sent.request.handle)
            if accepted is None:
                continue  # it has had its end
            if not self._is_enabled or self._client.failure is not None:  # nothing will come back
                lost[sent.request.handle] = None
            elif not is_blameless and sent.num_deaths >= MAX_MOVES:
                num_deaths = sent.num_deaths + 1
                lost[sent.request.handle] = f"the request was there at {num_deaths} deaths of ranks and may be their cause"
            else:
                self._outputs.note_move(sent.request.handle, self._clock())
                self.num_moved += 1
                num_deaths = sent.num_deaths + (not is_blameless)
                self._resend(dataclasses.replace(continued(sent, accepted), num_deaths=num_deaths), self._clock())
        return lost

    def resume(self) -> None:
        """A rank came back: what waits is tried again, in its order."""
        waiting, self._waiting = self._waiting, {}
        for handle, entry in waiting.items():
            if self._outputs.accepted_token_ids(handle) is not None:
                self._resend(entry.sent, entry.since_s)

    def expire(self) -> None:
        """To be called from time to time: ends what has waited for too long, here or for a rank of its own."""
        for sent in self._client.take_stranded():
            try:
                self.send(sent)  # as if it came now: it waits if its rank may come back, and is refused if not
            except GatewayError as error:
                self._fail(sent.request.handle, error)
        oldest_s = self._clock() - self._max_wait_s
        for handle in [handle for handle, entry in self._waiting.items() if entry.since_s <= oldest_s]:
            self._fail(handle, EngineDeadError(f"no rank took the request within {self._max_wait_s:g} s"))

    def forget(self) -> None:
        """Nothing will come back; who waits has been told."""
        self._waiting.clear()

    def _resend(self, sent: SentRequest, since_s: float) -> None:
        handle = sent.request.handle
        try:
            rank_id = self._client.add_request(sent)
        except (OverloadedError, EngineDeadError):
            self._waiting[handle] = _Waiting(sent, since_s)  # the end of all hope comes as `EngineFailed`, and ends it
        except GatewayError as error:
            self._fail(handle, error)
        else:
            if rank_id is not None:
                self._outputs.set_rank(handle, rank_id.rank, self._clock())

    def _fail(self, handle: int, error: GatewayError) -> None:
        siblings = self._outputs.fail([handle], error)
        self.drop([handle, *siblings])
        self._client.abort_requests(siblings)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that no rank has, since then."""

    sent: SentRequest
    since_s: float


def continued(sent: SentRequest, accepted: Sequence[int]) -> SentRequest:
    """The same request for another rank: `accepted` are the tokens that it has had so far, after its original prompt."""
    request = sent.request
    prompt = [*request.prompt_token_ids[: request.num_original_prompt_tokens], *accepted]
    params = request.sampling_params
    if accepted and params.prompt_logprobs is not None:  # they came with the first token
        params = dataclasses.replace(params, prompt_logprobs=None)
    # A pin was to a rank that is gone: going on matters more.
    routing = dataclasses.replace(sent.routing, num_prompt_tokens=len(prompt), pinned_rank=None)
    request = dataclasses.replace(request, prompt_token_ids=prompt, sampling_params=params)
    return dataclasses.replace(sent, request=request, routing=routing, has_moved=True)
