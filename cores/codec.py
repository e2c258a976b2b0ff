"""Messages to bytes and back: MessagePack, versioned, never pickle.

A frame is `[PROTOCOL_VERSION, kind, *fields]`. Most messages go through converters derived from their type hints, which check
every value on the way in. Those that a busy server sends by the thousand are written out by hand.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from array import array
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from cores import control_messages as control
from cores import messages as m
from cores.pooling_params import PoolingParams
from cores.sampling_params import SamplingParams, pack_sampling_params

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a 1M-token prompt takes 5 MB

if sys.byteorder != "little":  # columns are sent as they lie in memory
    raise ImportError("the wire codec needs a little-endian machine")

Message = (
    m.Command | m.EngineReady | m.EngineCoreOutputs | m.Heartbeat | m.LoadReport | m.CacheEvents | m.EngineCoreDead
    | m.UtilityResult | m.MemberReport | m.MemberLeft | m.GroupLoads | control.ControlMessage
)  # fmt: skip


class CodecError(ValueError):
    """A frame that is not one of ours. Counted and dropped by whoever reads it; never a reason to die."""


class VersionMismatchError(CodecError):
    def __init__(self, theirs: object) -> None:
        super().__init__(f"peer speaks protocol version {theirs!r}, this process version {PROTOCOL_VERSION}")


def encode(message: Message) -> bytes:
    """The frame of one message. Raises `TypeError` for a value that MessagePack cannot hold (a utility's result, say)."""
    kind, pack, _ = _BY_TYPE[type(message)]
    frame: bytes = msgpack.packb([PROTOCOL_VERSION, kind, *pack(message)])
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """Raises `CodecError` for anything but a whole, well-typed frame of this version."""
    if len(frame) > MAX_FRAME_BYTES:
        raise CodecError(f"frame of {len(frame)} bytes is above the limit of {MAX_FRAME_BYTES}")
    try:
        version, kind, *fields = msgpack.unpackb(frame, strict_map_key=False)
        if version != PROTOCOL_VERSION:
            raise VersionMismatchError(version)
        message: Message = _BY_KIND[kind](fields)
        return message
    except CodecError:
        raise
    except RecursionError as error:
        raise CodecError("frame is nested too deeply") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise CodecError(f"malformed frame: {type(error).__name__}: {error}") from error


# --- by type hints ----------------------------------------------------------------------------------------------------


def _converter(hint: Any) -> Callable[[Any], Any]:
    """A function that turns what MessagePack gives back into a value of the hinted type, or raises `CodecError`."""
    if hint is Any:
        return lambda value: value
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [a for a in args if a is not type(None)]
        convert = _converter(inner)
        return lambda value: None if value is None else convert(value)
    if origin is list:
        item = _converter(args[0])
        return lambda value: [item(v) for v in _checked(value, list)]
    if origin is tuple and args[-1] is Ellipsis:
        item = _converter(args[0])
        return lambda value: tuple(item(v) for v in _checked(value, list))
    if origin is tuple:
        items = [_converter(a) for a in args]
        return lambda value: tuple(c(v) for c, v in zip(items, _checked(value, list), strict=True))
    if origin is dict:
        key, item = _converter(args[0]), _converter(args[1])
        return lambda value: {key(k): item(v) for k, v in _checked(value, dict).items()}
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record_converter(hint)
    if issubclass(hint, enum.Enum):
        return typing.cast(Callable[[Any], Any], hint)
    if hint is float:
        return lambda value: float(_checked(value, (int, float)))
    return lambda value: _checked(value, hint)


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CodecError(f"expected {kind}, got {type(value).__name__}")
    return value


def _record_converter(cls: Any) -> Callable[[Any], Any]:
    """For a dataclass or NamedTuple sent as the list of its fields. Trailing fields may be missing (an older peer)."""
    hints = get_type_hints(cls)
    names = cls._fields if hasattr(cls, "_fields") else [f.name for f in dataclasses.fields(cls)]
    converters = [(name, _converter(hints[name])) for name in names]

    def convert(values: Any) -> Any:
        _checked(values, list)
        return cls(**{name: c(v) for (name, c), v in zip(converters, values, strict=False)})

    return convert


def _plain(value: Any) -> Any:
    """Nested records as lists of their fields; everything else as it is."""
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


_PARAM_CONVERTERS = {name: _converter(hint) for name, hint in get_type_hints(SamplingParams).items()}


# --- by hand: requests and outputs ------------------------------------------------------------------------------------


def _pack_add_request(message: m.AddRequest) -> list[Any]:
    r = message.request
    return [
        message.seq, r.handle, r.request_id, array("I", r.prompt_token_ids).tobytes(), pack_sampling_params(r.sampling_params),
        r.arrival_time_s, r.num_original_prompt_tokens, r.priority, r.lora_name, r.cache_salt, r.session_id, r.lora_id,
        None if r.pooling_params is None else _plain(r.pooling_params),
    ]  # fmt: skip


def _unpack_add_request(fields: list[Any]) -> m.AddRequest:
    seq, handle, request_id, prompt, params, arrival, num_original, priority, lora, salt, session, *rest = fields
    lora_id, pooling_params = (*rest, None, None)[:2]
    return m.AddRequest(
        _checked(seq, int),
        m.EngineCoreRequest(
            handle=_checked_uint32(handle),
            request_id=_checked(request_id, str),
            prompt_token_ids=_uint32s(prompt),
            sampling_params=_unpack_sampling_params(params),
            arrival_time_s=_checked(arrival, float),
            num_original_prompt_tokens=_checked(num_original, int),
            priority=_checked(priority, int),
            lora_name=_checked(lora, (str, types.NoneType)),
            cache_salt=_checked(salt, (str, types.NoneType)),
            session_id=_checked(session, (str, types.NoneType)),
            lora_id=_checked(lora_id, (str, types.NoneType)),
            pooling_params=None if pooling_params is None else _unpack_pooling_params(pooling_params),
        ),
    )


def _unpack_sampling_params(packed: Any) -> SamplingParams:
    """Types are checked here; ranges are `SamplingParams.verify`'s."""
    return SamplingParams(**{name: _PARAM_CONVERTERS[name](value) for name, value in _checked(packed, dict).items()})


def _pack_load(load: m.RankLoad) -> list[Any]:
    return [
        load.num_waiting, load.num_running, load.num_prefill_tokens, load.num_decodes, load.num_kv_blocks_used,
        load.num_kv_blocks, load.step_ms, load.prefill_tokens_per_s, load.decode_tokens_per_s,
    ]  # fmt: skip


def _pack_outputs(o: m.EngineCoreOutputs) -> list[Any]:
    return [
        o.rank_id, o.step, o.command_seq, _pack_load(o.load), o.handles.tobytes(), o.token_ids.tobytes(),
        b"" if o.counts is None else o.counts.tobytes(), o.first_tokens, o.finished, o.logprobs, o.weight_version,
        {row: _pack_prompt_logprobs(chunk) for row, chunk in o.prompt_logprobs.items()},
        o.vectors,
    ]  # fmt: skip


def _pack_prompt_logprobs(chunk: m.PromptLogprobsChunk) -> list[Any]:
    columns = (chunk.logprobs, chunk.ranks, chunk.top_token_ids, chunk.top_logprobs)
    return [chunk.start, chunk.num_top, *(column.tobytes() for column in columns)]


def _unpack_outputs(fields: list[Any]) -> m.EngineCoreOutputs:
    rank_id, step, command_seq, load, handles, token_ids, counts, first_tokens, finished, logprobs, version, *more = fields
    outputs = m.EngineCoreOutputs(
        rank_id=_unpack_rank_id(*rank_id),
        step=_checked(step, int),
        command_seq=_checked(command_seq, int),
        load=_unpack_load(load),
        handles=_uint32s(handles),
        token_ids=_uint32s(token_ids),
        counts=_uint32s(counts) if counts else None,
        first_tokens=_unpack_first_tokens(first_tokens),
        finished=_unpack_finished(finished),
        logprobs=_unpack_logprobs(logprobs),
        weight_version=_checked(version, int),
        prompt_logprobs=_unpack_prompt_logprobs(more[0]) if more and more[0] != {} else {},
        vectors=_unpack_vectors(more[1]) if len(more) > 1 else {},
    )
    num_rows = len(outputs.handles)
    num_tokens = num_rows if outputs.counts is None else sum(outputs.counts)
    if len(outputs.token_ids) != num_tokens or (outputs.counts is not None and len(outputs.counts) != num_rows):
        raise CodecError(f"{num_rows} rows announce {num_tokens} tokens, but {len(outputs.token_ids)} came")
    for rows in (outputs.first_tokens, outputs.finished, outputs.logprobs, outputs.prompt_logprobs, outputs.vectors):
        if rows and not (min(rows) >= 0 and max(rows) < num_rows):
            raise CodecError(f"extras for rows {sorted(rows)}, but there are {num_rows}")
    return outputs


def _unpack_prompt_logprobs(rows: Any) -> dict[int, m.PromptLogprobsChunk]:
    return {_checked(row, int): _unpack_chunk(*chunk) for row, chunk in _checked(rows, dict).items()}


def _unpack_chunk(
    start: Any, num_top: Any, logprobs: Any, ranks: Any, top_token_ids: Any, top_logprobs: Any
) -> m.PromptLogprobsChunk:
    chunk = m.PromptLogprobsChunk(
        _checked_uint32(start), _checked_uint32(num_top), _float32s(logprobs), _uint32s(ranks), _uint32s(top_token_ids),
        _float32s(top_logprobs),
    )  # fmt: skip
    num_tokens = len(chunk.logprobs)
    lengths = (len(chunk.ranks), len(chunk.top_token_ids), len(chunk.top_logprobs))
    if lengths != (num_tokens, num_tokens * chunk.num_top, num_tokens * chunk.num_top):
        raise CodecError(f"log-probabilities of {num_tokens} prompt tokens, but columns of {lengths}")
    return chunk


# By hand as well: converters for these took as long as all the rest of a message without extras.


def _unpack_rank_id(rank: Any, epoch: Any) -> m.RankId:
    return m.RankId(_checked(rank, int), _checked(epoch, int))


def _unpack_load(values: Any) -> m.RankLoad:
    if not _NUMBERS.issuperset(map(type, values)):
        raise CodecError(f"not a load: {values!r:.100}")
    return m.RankLoad(*values)


_NUMBERS = frozenset({int, float})


def _rows(hint: Any) -> Callable[[Any], Any]:
    """A converter of extras by row."""
    convert = _converter(dict[int, hint])
    return lambda rows: rows if rows == {} else convert(rows)


_unpack_first_tokens = _rows(m.FirstToken)
_unpack_finished = _rows(m.Finished)
_unpack_logprobs = _rows(list[m.TokenLogprobs])
_unpack_vectors = _rows(bytes)


_unpack_pooling_params = _converter(PoolingParams)


def _pack_cache_events(e: m.CacheEvents) -> list[Any]:
    return [e.rank_id, e.seq, e.is_snapshot, e.stored.tobytes(), e.evicted.tobytes()]


def _unpack_cache_events(fields: list[Any]) -> m.CacheEvents:
    rank_id, seq, is_snapshot, stored, evicted, *_ = fields
    return m.CacheEvents(
        _unpack_rank_id(*rank_id), _checked(seq, int), _checked(is_snapshot, bool), _uint64s(stored), _uint64s(evicted)
    )


def _checked_uint32(value: Any) -> int:
    if not 0 <= _checked(value, int) < 2**32:
        raise CodecError(f"expected an unsigned 32-bit number, got {value}")
    return int(value)


def _float32s(data: Any) -> array[float]:
    values = array("f")
    values.frombytes(_checked(data, bytes))
    return values


def _uint32s(data: Any) -> array[int]:
    values = array("I")
    values.frombytes(_checked(data, bytes))
    return values


def _uint64s(data: Any) -> array[int]:
    values = array("Q")
    values.frombytes(_checked(data, bytes))
    return values


# --- the table of kinds: a number is never used twice -----------------------------------------------------------------

_KINDS: dict[int, type] = {
    1: m.AddRequest,
    2: m.AbortRequests,
    3: m.UtilityCall,
    4: m.WatchCache,
    10: m.EngineReady,
    11: m.EngineCoreOutputs,
    12: m.Heartbeat,
    13: m.LoadReport,
    14: m.EngineCoreDead,
    15: m.UtilityResult,
    16: control.EngineStarting,
    17: m.CacheEvents,
    18: control.EngineAlive,
    19: control.RankLog,
    20: control.Shutdown,
    21: control.GroupState,
    22: control.AttachFrontEnd,
    23: control.GroupOrderDone,
    24: control.LauncherAlive,
    30: control.FrontEndHello,
    31: control.FrontEndReady,
    32: control.FrontEndFailed,
    33: control.RankDied,
    34: control.RankSuspected,
    35: control.RankStalled,
    36: control.AbortElsewhere,
    37: control.RankIdle,
    38: control.GroupOrder,
    39: control.AbortedElsewhere,
    40: m.MemberReport,
    41: m.MemberLeft,
    42: m.GroupLoads,
}

_Pack = Callable[[Any], Any]
_Unpack = Callable[[list[Any]], Any]
_BY_HAND: dict[type, tuple[_Pack, _Unpack]] = {
    m.AddRequest: (_pack_add_request, _unpack_add_request),
    m.EngineCoreOutputs: (_pack_outputs, _unpack_outputs),
    m.CacheEvents: (_pack_cache_events, _unpack_cache_events),
}


def _by_hints(cls: type) -> tuple[_Pack, _Unpack]:
    return _plain, _record_converter(cls)


_BY_TYPE: dict[type, tuple[int, _Pack, _Unpack]] = {
    cls: (kind, *(_BY_HAND.get(cls) or _by_hints(cls))) for kind, cls in _KINDS.items()
}
_BY_KIND: dict[int, _Unpack] = {kind: unpack for kind, _, unpack in _BY_TYPE.values()}
