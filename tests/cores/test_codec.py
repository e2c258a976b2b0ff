"""Frames: every message survives the way, bytes are pinned, and nothing but `CodecError` comes out of a bad one."""

from __future__ import annotations

import dataclasses
import typing
from array import array

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cores import control_messages as control
from cores import messages as m
from cores.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, CodecError, Message, VersionMismatchError, decode, encode
from cores.pooling_params import PoolingParams
from cores.sampling_params import Reasoning, RequestOutputKind, SamplingParams, StructuredOutputKind, StructuredOutputs

LOAD = m.RankLoad(1, 2, 300, 1, 40, 500, 12.5, 900.0, 80.0)
STATS = m.SchedulerStats(1, 2, 3, 4, 5, 6, 7)
RANK = m.RankId(3, 2)

ADD_REQUEST = m.AddRequest(
    5,
    m.EngineCoreRequest(
        handle=7,
        request_id="chatcmpl-1",
        prompt_token_ids=array("I", [1, 70000]),
        sampling_params=SamplingParams(temperature=0.0, seed=-3, max_tokens=9, stop_token_ids=(4, 5), logit_bias={8: -1.5}),
        arrival_time_s=1700000000.25,
        num_original_prompt_tokens=2,
        priority=-1,
        cache_salt="salt",
        pooling_params=PoolingParams(dimensions=8),
    ),
)
OUTPUTS = m.EngineCoreOutputs(
    rank_id=RANK,
    step=11,
    command_seq=5,
    load=LOAD,
    handles=array("I", [7, 8]),
    token_ids=array("I", [42]),
    counts=array("I", [1, 0]),
    first_tokens={0: m.FirstToken(16, 0.5)},
    finished={1: m.Finished(m.FinishReason.ERROR, error="no room")},
    logprobs={0: [m.TokenLogprobs(-0.5, 1, (42, 43), (-0.5, -2.0))]},
    prompt_logprobs={
        1: m.PromptLogprobsChunk(
            1, 2, array("f", [-0.5, -1.5]), array("I", [1, 9]), array("I", [7, 8, 9, 10]), array("f", [-0.5, -1, -2, -3])
        )
    },
    vectors={1: b"\0\0\x80\x3f"},
)

SAMPLES: list[Message] = [
    ADD_REQUEST,
    m.AbortRequests(6, (7, 8)),
    m.UtilityCall(7, 99, "reset_prefix_cache", ("x", 1, None)),
    m.WatchCache(8),
    m.EngineReady(
        rank_id=RANK, pid=1, node="n", device="cpu", max_model_len=10, vocab_size=20, eos_token_ids=(2, 0), block_size=16,
        num_kv_blocks=30, max_num_seqs=4, max_num_batched_tokens=50,
    ),
    OUTPUTS,
    m.Heartbeat(RANK, 11, True, 5, LOAD, STATS, m.EngineState.SLEEPING, 3, 0.5),
    m.LoadReport(RANK, 11, 5, LOAD, 0.25),
    m.CacheEvents(RANK, 4, True, array("Q", [1, 2**64 - 1]), array("Q", [5])),
    m.EngineCoreDead(RANK, "why"),
    m.UtilityResult(RANK, 99, {"a": [1]}, None),
    m.UtilityResult(RANK, 99, error="no", is_refusal=True),
    control.EngineStarting(RANK, 1, "loading"),
    control.EngineAlive(RANK),
    control.RankLog(RANK, ("one", "two")),
    control.LauncherAlive(),
    control.Shutdown(2.5),
    control.AttachFrontEnd(0, "ipc://in", "ipc://out"),
    control.GroupState((control.RankRecord(0, 1, "ready", None, 0, 55), control.RankRecord(1, 2, "dead", "killed", 1)), None),
    control.FrontEndHello(0, 1, "ipc://in", "ipc://out"),
    control.FrontEndReady(0, "AsyncMPClient"),
    control.AbortElsewhere("mine"),
    control.AbortElsewhere(None),
    control.AbortElsewhere("mine", "tenant", 1, 7),
    control.AbortedElsewhere(1, 7, True),
    control.RankIdle(1, m.RankId(2, 3)),
    control.GroupOrder(7, "restart", rank=2, drain_timeout_s=1.5),
    control.GroupOrderDone(7, "rank 9 does not exist", "unknown rank"),
    control.FrontEndFailed(0, "why"),
    control.RankDied(RANK, "why"),
    control.RankSuspected(RANK, 3.5),
    control.RankStalled(RANK, "no step"),
    m.MemberReport("me", "http://x", ((RANK, "ready", LOAD),)),
    m.MemberLeft("me"),
    m.GroupLoads(9, ((RANK, "ready", LOAD, "http://x", 0.25),)),
]  # fmt: skip


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(s) for s in SAMPLES} == set(typing.get_args(Message))


# A change of these bytes is a change of the protocol: append with a default, or count PROTOCOL_VERSION up.
GOLDEN = {
    "AddRequest": (
        "9f0101 05 07 aa63686174636d706c2d31 c4080100000070110100"
        " 85ab74656d7065726174757265cb0000000000000000 a473656564fd ae73746f705f746f6b656e5f696473920405"
        " aa6d61785f746f6b656e7309 aa6c6f6769745f626961738108cbbff8000000000000"
        " cb41d954fc40100000 02 ff c0 a473616c74 c0 c0 9208c0"
    ),
    "AbortRequests": "940102 06 920708",
    "EngineCoreOutputs": (
        "9f010b 920302 0b 05 990102cd012c0128cd01f4cb4029000000000000cb408c200000000000cb4054000000000000"
        " c4080700000008000000 c4042a000000 c4080100000000000000"
        " 81009210cb3fe0000000000000 81019303c0a76e6f20726f6f6d"
        " 81009194cbbfe0000000000000 01 922a2b 92cbbfe0000000000000cbc000000000000000 00"
        " 8101960102 c408000000bf0000c0bf c4080100000009000000"
        " c410070000000800000009000000 0a000000 c410000000bf000080bf000000c0000040c0"
        " 8101c4040000803f"
    ),
    "EngineCoreDead": "94010e 920302 a3776879",
    "CacheEvents": "970111 920302 04 c3 c4100100000000000000ffffffffffffffff c4080500000000000000",
    "Shutdown": "930114 cb4004000000000000",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_are_pinned(name: str) -> None:
    (message,) = (s for s in SAMPLES if type(s).__name__ == name)
    assert encode(message).hex() == GOLDEN[name].replace(" ", "")


def test_an_all_tokens_message_needs_no_counts() -> None:
    outputs = m.EngineCoreOutputs(
        rank_id=RANK, step=1, command_seq=1, load=LOAD, handles=array("I", [1, 2]), token_ids=array("I", [3, 4])
    )
    assert decode(encode(outputs)) == outputs


def test_a_foreign_version_is_refused_with_both_versions_named() -> None:
    frame = msgpack.packb([PROTOCOL_VERSION + 1, 20, 1.0])
    with pytest.raises(VersionMismatchError, match=f"version {PROTOCOL_VERSION + 1}, this process version {PROTOCOL_VERSION}"):
        decode(frame)


def test_a_field_that_an_older_peer_does_not_know_takes_its_default() -> None:
    frame = msgpack.packb([PROTOCOL_VERSION, 21, [[0, 1, "ready"]]])
    assert decode(frame) == control.GroupState((control.RankRecord(0, 1, "ready"),))


def test_outputs_of_an_older_engine_lack_what_was_added_since() -> None:
    values = msgpack.unpackb(encode(OUTPUTS), strict_map_key=False)
    outputs = decode(msgpack.packb(values[:13]))
    assert isinstance(outputs, m.EngineCoreOutputs)
    assert (outputs.prompt_logprobs, outputs.vectors) == ({}, {})


def test_every_kind_of_parameter_survives_the_way() -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(StructuredOutputKind.JSON, "{}", "response_format", Reasoning("<", ">", True)),
        bad_words=("a",),
        bad_words_token_ids=((1, 2), (3,)),
        prompt_logprobs=0,
        allowed_token_ids=(),
        output_kind=RequestOutputKind.DELTA,
    )
    message = m.AddRequest(5, dataclasses.replace(ADD_REQUEST.request, sampling_params=params))
    assert decode(encode(message)) == message


def test_only_parameters_that_differ_from_their_default_cross_the_wire() -> None:
    packed = msgpack.unpackb(encode(ADD_REQUEST), strict_map_key=False)[6]
    assert set(packed) == {"temperature", "seed", "stop_token_ids", "max_tokens", "logit_bias"}


def test_a_request_of_an_older_peer_lacks_what_was_added_since() -> None:
    values = msgpack.unpackb(encode(ADD_REQUEST), strict_map_key=False)
    request = decode(msgpack.packb(values[:13]))
    assert isinstance(request, m.AddRequest)
    assert request.request == dataclasses.replace(ADD_REQUEST.request, pooling_params=None)


def _mutated_request(**fields: object) -> bytes:
    values = msgpack.unpackb(encode(ADD_REQUEST), strict_map_key=False)
    names = (
        "version",
        "kind",
        "seq",
        "handle",
        "request_id",
        "prompt",
        "params",
        "arrival",
        "num_original",
        "priority",
        "lora",
    )
    for name, value in fields.items():
        values[names.index(name)] = value
    return typing.cast(bytes, msgpack.packb(values))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x90",
        msgpack.packb({}),
        msgpack.packb([PROTOCOL_VERSION]),
        msgpack.packb([PROTOCOL_VERSION, 255]),
        msgpack.packb([PROTOCOL_VERSION, [], 1]),
        msgpack.packb([PROTOCOL_VERSION, 2, 1, [True]]),
        msgpack.packb([PROTOCOL_VERSION, 2, 1, "78"]),
        _mutated_request(handle=-1),
        _mutated_request(handle=2**32),
        _mutated_request(prompt=b"123"),
        _mutated_request(prompt=[1, 2]),
        _mutated_request(params={"seed": 1.5}),
        _mutated_request(params={"logit_bias": {"a": 1.0}}),
        _mutated_request(params={"stop_token_ids": ["a"]}),
        _mutated_request(params={"output_kind": "loud"}),
        _mutated_request(params={"unheard_of": 1}),
        _mutated_request(params={"structured_outputs": ["regex"]}),
        _mutated_request(params={"structured_outputs": ["riddle", "a", "response_format"]}),
        _mutated_request(params={"structured_outputs": ["regex", "a", "response_format", ["<", ">"]]}),
        _mutated_request(params={"bad_words_token_ids": [[1, "a"]]}),
        _mutated_request(lora=5),
        b"\x91" * 2000 + b"\x01",
        encode(control.Shutdown(1.0)) + b"\x00",
    ],
)
def test_malformed_frames_raise_codec_error(frame: bytes) -> None:
    with pytest.raises(CodecError):
        decode(frame)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (2, [1, "x"]),  # rank id
        (5, [None] * 8),  # load
        (6, b"\0" * 12),  # three handles, but counts for two rows
        (7, b"\0" * 8),  # one token too many
        (9, {2: [1, 0.5]}),  # a first token in a row that is not there
        (10, {0: [9]}),  # an unknown reason
        (11, {0: [[1.0, 1, [1], ["x"]]]}),
        (13, {2: [1, 0, b"", b"", b"", b""]}),
        (13, {0: [1, 0, b"\0" * 4, b"", b"", b""]}),  # a log-probability without a rank
        (13, {0: [1, 1, b"\0" * 4, b"\0" * 4, b"", b""]}),  # an alternative is missing
        (13, {0: [1, 1, b"\0" * 3, b"", b"", b""]}),
    ],
)
def test_inconsistent_outputs_raise_codec_error(position: int, value: object) -> None:
    values = msgpack.unpackb(encode(OUTPUTS), strict_map_key=False)
    values[position] = value
    with pytest.raises(CodecError):
        decode(msgpack.packb(values))


def test_a_frame_above_the_size_limit_is_not_even_read() -> None:
    with pytest.raises(CodecError, match="above the limit"):
        decode(bytes(MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=200))
@settings(max_examples=400)
def test_random_bytes_raise_codec_error_or_are_a_message(frame: bytes) -> None:
    _decode_or_codec_error(frame)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=400)
def test_damaged_frames_raise_codec_error_or_are_a_message(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_codec_error(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=400)
def test_values_of_any_type_in_any_field_raise_codec_error_or_are_a_message(message: Message, data: st.DataObject) -> None:
    values = msgpack.unpackb(encode(message), strict_map_key=False)
    junk = st.recursive(
        st.one_of(
            st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=3), st.binary(max_size=8)
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.integers(0, 9), inner, max_size=2)),
        max_leaves=5,
    )
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(junk)
    _decode_or_codec_error(msgpack.packb(values))


def _decode_or_codec_error(frame: bytes) -> None:
    try:
        message = decode(frame)
    except CodecError:
        return
    assert isinstance(message, typing.get_args(Message))
