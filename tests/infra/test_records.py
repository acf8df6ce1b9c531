import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from infra import records
from k3core.errors import IntegrityError
from k3core.types import (
    CriterionResult,
    EvalReport,
    Message,
    PolicyVersion,
    Prompt,
    Ref,
    SamplingParams,
    Score,
    ScoredGroup,
    Supports,
    ToolCall,
    Trajectory,
)


def trajectory(tokens: int = 3, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "prompt_id": "p",
        "sample": 1,
        "seed": 2**40,
        "tokens_T": np.arange(tokens, dtype=np.int32),
        "loss_mask_T": np.arange(tokens) % 2 == 0,
        "rollout_logprobs_T": -np.arange(tokens, dtype=np.float32) / 3,
        "routed_experts_TLk": np.full((tokens, 2, 4), 255, np.uint8),
        "policy_step_T": np.full(tokens, -1, np.int32),
        "sampling": SamplingParams(temperature=0.7),
        "stop_reason": "finished",
        "num_turns": 1,
        "num_tool_calls": 0,
        "deliverables": {"out/a.md": "text – mit Umlaut ä\n\u0000"},
        "raw_logprobs_T": -np.arange(tokens, dtype=np.float32) / 7,
        "supports": Supports.of_rows([np.arange(n + 1, dtype=np.int32) if n % 2 == 0 else None for n in range(tokens)]),
    }
    return Trajectory(**values | changes)


def every_noun() -> list[Any]:
    ref = Ref("file:///x", "ab" * 32, 7)
    call = ToolCall("read", {"path": "a", "deep": [1, {"x": None}]})
    message = Message("assistant", "hi", thinking="", tool_calls=(call, ToolCall("bad", None, "not JSON")))
    criterion = CriterionResult("c1", "title", "abstained", "why")
    score = Score(None, None, None, (criterion,), "abstained")
    return [
        ref,
        call,
        message,
        Prompt("p", "lab", (message, Message("user", "go")), {"rubric": [{"id": "c1"}], "n": 1.5, "empty": {}}),
        SamplingParams(),
        trajectory(),
        Supports(np.array([3, 7, 2], np.int32), np.array([0, 2, 1], np.int32)),
        criterion,
        score,
        ScoredGroup("p", (trajectory(2), trajectory(0)), (score, Score(0.1, 1 / 3, True, ()))),
        PolicyVersion("r", 3, "delta", ref, "cd" * 32, 2),
        EvalReport(
            "r", 3, "k3", "ef", SamplingParams(), {"p": (0.1, None)}, {"p": (1.0,)}, {"p": (True, None)}, {}, {}, 2.5
        ),
    ]


def same(a: Any, b: Any) -> bool:
    """Equal types and bits, down to arrays, NaN and the sign of zero."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


@pytest.mark.parametrize("value", every_noun(), ids=lambda value: type(value).__name__)
def test_every_noun_returns_alone_in_a_list_and_in_a_tuple(value: Any) -> None:
    noun: Any = type(value)
    assert same(records.decode(records.encode(value), noun), value)
    assert same(records.decode(records.encode([value, value]), list[noun]), [value, value])
    assert same(records.decode(records.encode((value, value)), tuple[noun, ...]), (value, value))


def test_every_noun_is_covered() -> None:
    assert {type(value) for value in every_noun()} == set(records.NOUNS)


def test_an_empty_sequence_returns_as_one_of_any_noun() -> None:
    assert records.decode(records.encode(()), tuple[Trajectory, ...]) == ()
    assert records.decode(records.encode([]), list[Score]) == []


@settings(deadline=None)
@given(
    npst.arrays(
        st.sampled_from([np.dtype(word) for word in ("<f4", ">f4", "<f8", "<f2", "u1", "<i8", "?")]),
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_arrays_return_bit_for_bit(array: np.ndarray) -> None:
    back = records.decode(records.encode(trajectory(rollout_logprobs_T=array)), Trajectory)
    assert same(back.rollout_logprobs_T, array)


def test_nan_payloads_in_arrays_return() -> None:
    array = np.array([0x7FC00001, 0xFFFFFFFF, 0x80000000], np.uint32).view(np.float32)
    assert same(
        records.decode(records.encode(trajectory(rollout_logprobs_T=array)), Trajectory).rollout_logprobs_T, array
    )


def test_a_view_that_is_not_contiguous_returns_as_its_values() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2].T
    assert np.array_equal(records.decode(records.encode(trajectory(tokens_T=array)), Trajectory).tokens_T, array)


@settings(deadline=None)
@given(st.floats())
def test_floats_return_exactly_and_never_as_null(value: float) -> None:
    back = records.decode(records.encode(Score(value, None, None, ())), Score)
    assert same(back.value, value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_hidden_data_returns(hidden: dict[str, Any]) -> None:
    assert same(records.decode(records.encode(Prompt("p", "e", (), hidden)), Prompt).hidden, hidden)


def test_equal_values_give_equal_bytes() -> None:
    assert records.encode(trajectory()) == records.encode(trajectory())


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ({"a": {1: "x"}}, "keys must be strings"),
        ({"a": {"dtype": "f4", "shape": [], "base64": ""}}, "would be read as an array"),
        ({"a": {1, 2}}, "a set has no byte form"),
        ({"a": np.float32(1)}, "a float32 has no byte form"),
        ({"a": np.array(["x"])}, "an array of <U1 has no byte form"),
    ],
)
def test_what_would_not_return_is_refused(hidden: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        records.encode(Prompt("p", "e", (), hidden))


@pytest.mark.parametrize("value", [{"a": 1}, "text", [SamplingParams(), Ref("u", "s", 1)], [1]])
def test_what_is_no_noun_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected nouns of one kind"):
        records.encode(value)


def test_a_record_of_another_type_is_refused_by_name() -> None:
    data = records.encode(SamplingParams())
    with pytest.raises(IntegrityError, match=r"^f\.k3: expected Trajectory, found SamplingParams"):
        records.decode(data, Trajectory, "f.k3")
    with pytest.raises(IntegrityError, match=r"^f\.k3: expected \[SamplingParams\], found SamplingParams"):
        records.decode(data, list[SamplingParams], "f.k3")
    with pytest.raises(IntegrityError, match=r"^f\.k3: expected SamplingParams, found \[\]"):
        records.decode(records.encode([]), SamplingParams, "f.k3")


def record(document: Any) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(json.dumps(document).encode())


PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 96}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": 2, "type": "SamplingParams", "value": PARAMS}, "expected record schema 1, found 2"),
        ({"type": "SamplingParams", "value": PARAMS}, "expected record schema 1, found None"),
        ({"schema": 1, "type": "SamplingParams"}, "expected SamplingParams"),
        ({"schema": 1, "type": "SamplingParams", "value": PARAMS | {"extra": 1}}, "found 0.extra"),
        ({"schema": 1, "type": "SamplingParams", "value": PARAMS | {"top_k": "many"}}, "found 0.top_k"),
        ([], "found a list"),
        ({"dtype": "f4", "shape": [2], "base64": "AAAA"}, "does not fit 3 bytes"),
        ({"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}, "other bytes"),
    ],
)
def test_a_document_that_is_no_record_is_refused_by_name(document: Any, message: str) -> None:
    with pytest.raises(IntegrityError, match=rf"^f\.k3: .*{message}"):
        records.decode(record(document), SamplingParams, "f.k3")


def test_a_trajectory_of_before_supports_were_recorded_says_that_there_are_none() -> None:
    text = zstandard.ZstdDecompressor().decompress(records.encode(trajectory()))
    document = json.loads(text)
    for name in ("raw_logprobs_T", "supports"):
        del document["value"][name]
    back = records.decode(record(document), Trajectory)
    assert same(back, trajectory(raw_logprobs_T=None, supports=None))


def test_a_record_cut_at_any_length_or_grown_is_refused_by_name() -> None:
    data = records.encode(trajectory())
    for altered in [data[:length] for length in range(len(data))] + [data + b"\0", data + data]:
        with pytest.raises(IntegrityError, match=r"^f\.k3: "):
            records.decode(altered, Trajectory, "f.k3")


def test_a_frame_without_checksum_is_refused() -> None:
    document = json.dumps({"schema": 1, "type": "SamplingParams", "value": PARAMS}).encode()
    with pytest.raises(IntegrityError, match="found one without"):
        records.decode(zstandard.ZstdCompressor(write_checksum=False).compress(document), SamplingParams)
