"""An episode as an MLflow trace: turns, calls and verdicts, in order.

No time of a turn is recorded anywhere, and none is made up: every span begins at the start of the evaluation, plus one
microsecond for each span before it, and has no length.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow.entities import AssessmentError, AssessmentSource, Feedback, Span, SpanType
from mlflow.entities.trace_info import TraceInfo
from mlflow.entities.trace_location import TraceLocation
from mlflow.entities.trace_state import TraceState
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import (
    TRACE_SCHEMA_VERSION,
    TRACE_SCHEMA_VERSION_KEY,
    AssessmentMetadataKey,
    SpanAttributeKey,
    TraceMetadataKey,
    TraceTagKey,
)

from infra.tracking.conversation import Called, Turn
from infra.tracking.evaluation import Evaluation, Graded, Traced, trace_id
from k3core.errors import RunError
from k3core.types import CriterionResult, Message, StopReason, ToolCall

TIMING = "not recorded: spans are in order and have no length"

_MAX_TEXT = 20_000
_MAX_PREVIEW = 1_000
_MAX_METADATA = 250
_STEP_NS = 1_000


@dataclass(frozen=True, slots=True)
class Node:
    """A span before it has ids and a place in time."""

    name: str
    kind: str
    inputs: Any
    outputs: Any
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def log_traces(uri: str, experiment_id: str, run_id: str, model_id: str, evaluation: Evaluation) -> None:
    """Writes what is not there yet: all ids follow from run, step, prompt and sample. Returns when it is stored.

    Raises RunError for a server that keeps no spans.
    """
    if not evaluation.traces:
        return
    client = TracingClient(uri)
    spans: list[Span] = []
    for traced in evaluation.traces:
        identity = trace_id(run_id, evaluation.policy.step, traced.graded)
        client.start_trace(_info(identity, experiment_id, run_id, model_id, evaluation, traced))
        spans += _spans(identity, evaluation.started_ms, evaluation, traced)
    try:
        client.log_spans(experiment_id, spans)
    except NotImplementedError as error:
        raise RunError(
            f"{uri} keeps no traces ({error}): update that server, or set tracking.traces_per_evaluation = 0"
        ) from error


def nodes_of(evaluation: Evaluation, traced: Traced) -> list[Node]:
    """The episode first, then what it consists of."""
    graded = traced.graded
    trajectory, score = graded.trajectory, graded.score
    policy = evaluation.policy
    root = Node(
        "episode",
        SpanType.AGENT,
        {"messages": [_message(message) for message in traced.conversation.opening]},
        {
            "reward": score.value,
            "all_pass": score.all_pass,
            "stop": trajectory.stop_reason,
            "deliverables": trajectory.deliverables,
        },
        {
            "k3.run": policy.run,
            "k3.step": policy.step,
            "k3.weights_sha256": policy.weights_sha256,
            "k3.prompt": trajectory.prompt_id,
            "k3.sample": trajectory.sample,
            "k3.seed": trajectory.seed,
            "k3.reward": score.value,
            "k3.ungraded": score.reason,
            "k3.selected_as": traced.role,
            "k3.timing": TIMING,
        },
        trajectory.error,
    )
    nodes = [root]
    read = [_message(message) for message in traced.conversation.opening]
    for number, turn in enumerate(traced.conversation.turns, start=1):
        is_last = number == len(traced.conversation.turns)
        nodes.append(_turn(number, turn, read, trajectory.stop_reason if is_last else None))
        nodes += [_call(called) for called in turn.calls]
        read = [
            {"role": "tool", "tool_call_id": f"call_{index}", "content": called.output}
            for index, called in enumerate(turn.calls, start=1)
            if called.output is not None
        ]
    return [*nodes, *(_verdict(result, evaluation.judge) for result in score.criteria)]


def _turn(number: int, turn: Turn, read: list[dict[str, Any]], stop: StopReason | None) -> Node:
    """read: the messages since the turn before, of all that the turn was sampled after. stop: of the last turn."""
    message = {"role": "assistant", "content": turn.text} if turn.message is None else _message(turn.message)
    usage = {
        "input_tokens": turn.num_context,
        "output_tokens": turn.num_sampled,
        "total_tokens": turn.num_context + turn.num_sampled,
    }
    attributes: dict[str, Any] = {
        SpanAttributeKey.CHAT_USAGE: usage,
        "k3.context_tokens": turn.num_context,
        "k3.sampled_tokens": turn.num_sampled,
        "k3.mean_logprob": turn.mean_logprob,
    }
    if stop is not None:
        attributes["k3.stop"] = stop
    error = None if turn.message is not None else f"no well-formed turn: {stop}"
    outputs = {"choices": [{"index": 0, "message": message}]}
    return Node(f"turn {number}", SpanType.CHAT_MODEL, {"messages": read}, outputs, attributes, error)


def _call(called: Called) -> Node:
    call = called.call
    shown = "(the episode ended before the policy could read an answer)" if called.output is None else called.output
    error = (call.error or called.output) if called.is_error else None
    return Node(
        call.name or "(no tool)", SpanType.TOOL, _arguments(call), shown, {"k3.is_error": called.is_error}, error
    )


def _verdict(result: CriterionResult, judge: str) -> Node:
    outputs = {"verdict": result.verdict, "reasoning": result.reasoning}
    lost = result.verdict == "infrastructure_error"
    name = f"verdict: {result.title}"
    inputs = {"criterion": result.id, "title": result.title, "judge": judge}
    return Node(name, SpanType.EVALUATOR, inputs, outputs, error=result.reasoning if lost else None)


def _info(
    identity: str, experiment_id: str, run_id: str, model_id: str, evaluation: Evaluation, traced: Traced
) -> TraceInfo:
    graded, policy = traced.graded, evaluation.policy
    key = f"{policy.run}/{policy.step}/{graded.trajectory.prompt_id}/{graded.trajectory.sample}"
    broken = graded.trajectory.stop_reason == "infrastructure_error"
    return TraceInfo(
        trace_id=identity,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=evaluation.started_ms,
        state=TraceState.ERROR if broken else TraceState.OK,
        request_preview=_request(traced)[:_MAX_PREVIEW],
        response_preview=_response(graded)[:_MAX_PREVIEW],
        client_request_id=key,
        trace_metadata={
            TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION),
            TraceMetadataKey.SOURCE_RUN: run_id,
            TraceMetadataKey.MODEL_ID: model_id,
            "k3.weights_sha256": policy.weights_sha256,
            "k3.timing": TIMING[:_MAX_METADATA],
        },
        tags={
            TraceTagKey.TRACE_NAME: f"{policy.run}@{policy.step}",
            "k3.trace": key,
            "k3.run": policy.run,
            "k3.step": str(policy.step),
            "k3.prompt": graded.trajectory.prompt_id,
            "k3.sample": str(graded.trajectory.sample),
            "k3.selected_as": traced.role,
            "k3.stop": graded.trajectory.stop_reason,
        },
        assessments=list(_assessments(identity, run_id, evaluation, graded)),
    )


def _assessments(identity: str, run_id: str, evaluation: Evaluation, graded: Graded) -> Iterator[Feedback]:
    """The reward and each verdict where MLflow counts and compares them; no verdict is an error, never a value."""
    score = graded.score
    rule = AssessmentSource("CODE", "reward")
    judge = AssessmentSource("CODE" if evaluation.judge_is_code else "LLM_JUDGE", evaluation.judge)
    if score.value is not None:
        yield _feedback(identity, run_id, evaluation, "reward", rule, value=score.value)
        yield _feedback(identity, run_id, evaluation, "all_pass", rule, value=bool(score.all_pass))
    elif score.reason is not None:
        error = AssessmentError(score.reason.upper(), graded.trajectory.error or "a verdict is missing")
        yield _feedback(identity, run_id, evaluation, "reward", rule, error=error)
    for result in score.criteria:
        if result.verdict in ("pass", "fail"):
            passed, lost = result.verdict == "pass", None
        else:
            passed, lost = None, AssessmentError(result.verdict.upper(), _shown(result.reasoning))
        yield _feedback(identity, run_id, evaluation, result.title, judge, passed, lost, _shown(result.reasoning))


def _feedback(
    identity: str,
    run_id: str,
    evaluation: Evaluation,
    name: str,
    source: AssessmentSource,
    value: float | bool | None = None,
    error: AssessmentError | None = None,
    rationale: str | None = None,
) -> Feedback:
    feedback = Feedback(
        name=name[:_MAX_METADATA],
        value=value,
        error=error,
        source=source,
        trace_id=identity,
        rationale=rationale,
        metadata={AssessmentMetadataKey.SOURCE_RUN_ID: run_id},
        create_time_ms=evaluation.started_ms,
        last_update_time_ms=evaluation.started_ms,
    )
    feedback.assessment_id = "a-" + hashlib.sha256(f"{identity}/{name}".encode()).hexdigest()[:32]
    return feedback


def _spans(identity: str, started_ms: int, evaluation: Evaluation, traced: Traced) -> Iterator[Span]:
    root_id = _span_id(identity, 0)
    for index, node in enumerate(nodes_of(evaluation, traced)):
        at_ns = started_ms * 1_000_000 + index * _STEP_NS
        attributes = {
            SpanAttributeKey.REQUEST_ID: identity,
            SpanAttributeKey.SPAN_TYPE: node.kind,
            SpanAttributeKey.INPUTS: node.inputs,
            SpanAttributeKey.OUTPUTS: node.outputs,
            **node.attributes,
        }
        yield Span.from_dict(
            {
                "trace_id": _base64(identity.removeprefix("tr-")),
                "span_id": _base64(_span_id(identity, index)),
                "parent_span_id": _base64(root_id) if index else None,
                "name": node.name,
                "start_time_unix_nano": at_ns,
                "end_time_unix_nano": at_ns,
                "events": [],
                "status": {
                    "code": "STATUS_CODE_OK" if node.error is None else "STATUS_CODE_ERROR",
                    "message": node.error or "",
                },
                "attributes": {key: _json(value) for key, value in attributes.items()},
            }
        )


def _span_id(identity: str, index: int) -> str:
    return hashlib.sha256(f"{identity}/{index}".encode()).hexdigest()[:16]


def _json(value: Any) -> str:
    return json.dumps(_shown(value), ensure_ascii=False)


def _base64(hexadecimal: str) -> str:
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()


def _message(message: Message) -> dict[str, Any]:
    """As chat APIs write it, which MLflow renders as a conversation."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        shown["reasoning_content"] = message.thinking
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(_arguments(call), ensure_ascii=False)},
            }
            for index, call in enumerate(message.tool_calls, start=1)
        ]
    return shown


def _arguments(call: ToolCall) -> Mapping[str, Any]:
    return {"unreadable": call.error} if call.arguments is None else call.arguments


def _request(traced: Traced) -> str:
    asked = [message.content for message in traced.conversation.opening if message.role == "user"]
    return asked[-1] if asked else traced.graded.trajectory.prompt_id


def _response(graded: Graded) -> str:
    grade = f"not graded ({graded.score.reason})" if graded.score.value is None else f"reward {graded.score.value:.3f}"
    delivered = "\n".join(f"{name}:\n{text}" for name, text in sorted(graded.trajectory.deliverables.items()))
    return f"{grade}, {graded.trajectory.stop_reason}\n{delivered}"


def _shown(value: Any) -> Any:
    """JSON that a page can show and MLflow can carry: long texts cut, integers beyond 64 bits as text."""
    match value:
        case str() if len(value) > _MAX_TEXT:
            return f"{value[:_MAX_TEXT]}… [{len(value) - _MAX_TEXT} characters more]"
        case int() if not -(2**63) <= value < 2**63:
            return str(value)
        case Mapping():
            return {str(key): _shown(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_shown(inner) for inner in value]
        case _:
            return value
