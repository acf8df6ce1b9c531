"""Arguments are strict, outputs are bounded and deterministic, and no pattern takes time or memory without end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3core.envs.environment import Limits
from k3core.envs.tools import TOOLS, run_call
from k3core.envs.workspace import Workspace
from k3core.types import ToolCall

LIMITS = Limits(tool_timeout_s=0.3)
DOCUMENTS: dict[str, str] = {
    "nda.md": "NDA with Acme\n1. notice 14\n2. payment 45\n",
    "msa.md": "MSA with Birch\n1. payment 60\n",
    "playbook.md": "payment max 30\n",
    "annex/a.md": "Payment\n",
    "long.txt": "a" * 5000 + "\n",
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Workspace]:
    """For calls that change nothing."""
    workspace = Workspace(DOCUMENTS)
    yield workspace
    workspace.close()


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    workspace = Workspace(DOCUMENTS)
    yield workspace
    workspace.close()


def call(workspace: Workspace, name: str, /, **arguments: Any) -> str:
    return run_call(ToolCall(name, arguments), workspace, LIMITS).content


def test_grep_prints_file_line_and_text_in_file_order(shared: Workspace) -> None:
    assert call(shared, "grep", pattern="payment") == (
        "msa.md:1. payment 60\nnda.md:2. payment 45\nplaybook.md:payment max 30"
    )
    assert call(shared, "grep", pattern="^2", path="nda.md") == "2. payment 45"
    assert call(shared, "grep", pattern="Payment", path="annex") == "annex/a.md:Payment"
    assert call(shared, "grep", pattern="(?i)PAYMENT", path="annex") == "annex/a.md:Payment"
    assert call(shared, "grep", pattern="Zephyr") == "no matches"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.md", "msa.md\nnda.md\nplaybook.md"),
        ("**/*.md", "annex/a.md\nmsa.md\nnda.md\nplaybook.md"),
        ("**", "annex/a.md\nlong.txt\nmsa.md\nnda.md\nplaybook.md"),
        ("annex/*", "annex/a.md"),
        ("[mn]*.md", "msa.md\nnda.md"),
        ("../*", "no matches"),
        ("/etc/*", "no matches"),
        ("*/" * 99 + "*", "no matches"),
        ("**/" * 99 + "*a*a*a*a*a*a*b", "no matches"),
    ],
)
def test_glob_matches_whole_paths(shared: Workspace, pattern: str, found: str) -> None:
    assert call(shared, "glob", pattern=pattern) == found


def test_read_takes_a_range_of_lines(shared: Workspace) -> None:
    assert call(shared, "read", path="nda.md") == "NDA with Acme\n1. notice 14\n2. payment 45"
    assert call(shared, "read", path="nda.md", offset=2, limit=1) == "1. notice 14"
    assert call(shared, "read", path="nda.md", offset=4) == "error: offset 4 is past the last line, 3"


def test_write_and_edit_change_real_files(workspace: Workspace) -> None:
    assert call(workspace, "write", path="memo.md", content="file nda.md\nvalue 1") == "wrote memo.md"
    assert call(workspace, "edit", path="memo.md", old="value 1", new="value 45") == "edited memo.md"
    assert call(workspace, "read", path="memo.md") == "file nda.md\nvalue 45"
    assert call(workspace, "edit", path="memo.md", old="a", new="b").startswith(
        "error: old must occur exactly once; it"
    )
    assert call(workspace, "edit", path="memo.md", old="", new="b").endswith("it occurs 0 times")
    assert call(workspace, "write", path="empty", content="") == "wrote empty"
    assert call(workspace, "read", path="empty") == "(empty)"


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("bash", {"command": "ls"}, "unknown tool"),
        ("grep", {}, "pattern: Field required"),
        ("grep", {"pattern": 3}, "pattern: Input should be a valid string"),
        ("grep", {"pattern": "a", "flags": "i"}, "flags: Extra inputs are not permitted"),
        ("grep", {"pattern": "a", "path": None}, "path: Input should be a valid string"),
        ("read", {"path": "nda.md", "offset": "2"}, "offset: Input should be a valid integer"),
        ("read", {"path": "nda.md", "offset": 2.0}, "offset: Input should be a valid integer"),
        ("read", {"path": "nda.md", "limit": True}, "limit: Input should be a valid integer"),
        ("read", {"path": "nda.md", "offset": 0}, "offset: Input should be greater than or equal to 1"),
        ("read", {"path": "none.md"}, "no such file: none.md"),
        ("read", {"path": "../secret"}, "bad path: must be relative and inside the workspace"),
        ("write", {"path": "memo.md", "content": ["a"]}, "content: Input should be a valid string"),
        ("write", {"path": "memo.md", "content": "\ud800"}, "content is not valid Unicode"),
        ("write", {"\ud800": 1, "path": "a", "content": "a"}, "Input should be a valid string"),
        ("read", {"path": "a\ud800"}, "bad path"),
        ("finish", {"answer": "done"}, "answer: Extra inputs are not permitted"),
        ("grep", {"pattern": "("}, "bad pattern: "),
    ],
)
def test_a_wrong_call_gets_one_short_error(shared: Workspace, name: str, arguments: dict[str, Any], error: str) -> None:
    result = run_call(ToolCall(name, arguments), shared, LIMITS)
    assert not result.ok
    assert result.content.startswith(f"error: {error}")
    assert "\n" not in result.content


def test_arguments_that_did_not_parse_are_reported_as_the_parser_said(shared: Workspace) -> None:
    assert run_call(ToolCall("grep", None, "not JSON"), shared, LIMITS).content == "error: not JSON"


def test_output_ends_at_the_byte_limit_with_a_marker(workspace: Workspace) -> None:
    call(workspace, "write", path="wide.md", content="é" * 1000)
    for text in (
        call(workspace, "read", path="wide.md"),
        call(workspace, "read", path="long.txt"),
        call(workspace, "grep", pattern="a"),
        call(workspace, "read", path="z" * 255, offset=1),
        run_call(ToolCall("finish", {"x" * 5000: 1}), workspace, LIMITS).content,
    ):
        assert len(text.encode()) <= LIMITS.max_output_bytes
    assert call(workspace, "read", path="wide.md").endswith("\n[truncated at 1500 bytes]")
    assert call(workspace, "grep", pattern="a").endswith("\n[truncated at 1500 bytes]")


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|aa)+", "((a{1,4}){1,4}){1,4}", "a*a*a*a*a*", "(.*)(.*)(.*)(.*)"])
def test_a_catastrophic_pattern_ends_at_the_time_limit(shared: Workspace, pattern: str) -> None:
    started = time.monotonic()
    text = call(shared, "grep", pattern=f"^{pattern}[bc]$", path="long.txt")
    assert time.monotonic() - started < 2
    assert text in ("error: the pattern takes too long", "no matches")


def test_the_time_limit_is_reached_at_all(shared: Workspace) -> None:
    assert call(shared, "grep", pattern="^(a|aa)+[bc]$", path="long.txt") == "error: the pattern takes too long"


def test_the_time_limit_spans_all_lines(shared: Workspace) -> None:
    result = run_call(ToolCall("grep", {"pattern": "payment"}), shared, Limits(tool_timeout_s=1e-9))
    assert result.content == "error: the pattern takes too long"


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{999}){999}){999}",
        "a{101}",
        "(?:a{11}){10}",
        "((((((a)+)+)+)+)+)+",
        "(?R)",
        "(?1)",
        "(?&x)",
        "(?V1)[a--b]",
        "(?:foo){e<=5}",
        "a" * 201,
        "a(?#x)+",
        "\\\\{9999}",
        "a{99999999999999999999}",
    ],
)
def test_a_pattern_that_compiles_without_bound_is_refused(shared: Workspace, pattern: str) -> None:
    assert call(shared, "grep", pattern=pattern).startswith(("error: bad pattern", "error: pattern is longer"))


def test_ordinary_patterns_are_not_refused(shared: Workspace) -> None:
    for pattern in (
        r"\d{2}",
        r"(?:pay|not)\w+",
        r"\(x\)|max \d+",
        r"\{|max",
        r"\p{Lu}\w+",
        r"(?<=max )\d+",
        "[0-9]{1,3}$",
    ):
        assert call(shared, "grep", pattern=pattern, path="playbook.md") in ("payment max 30", "no matches")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pattern=st.text(alphabet="ab(){}[]+*?|\\1,9^$.:=!<>PRQ-\n\u0663", max_size=30))
def test_no_pattern_raises(shared: Workspace, pattern: str) -> None:
    run_call(ToolCall("grep", {"pattern": pattern, "path": "nda.md"}), shared, LIMITS)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([spec.name for spec in TOOLS] + ["", "x"]),
    arguments=st.dictionaries(
        st.sampled_from(["path", "pattern", "content", "old", "new", "offset", "limit", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.lists(st.integers(), max_size=2)),
    ),
)
def test_no_arguments_raise(workspace: Workspace, name: str, arguments: dict[str, Any]) -> None:
    assert isinstance(run_call(ToolCall(name, arguments), workspace, LIMITS).content, str)


def test_specs_are_json_schemas_of_openai_functions() -> None:
    assert [spec.name for spec in TOOLS] == ["glob", "grep", "read", "write", "edit", "finish"]
    assert TOOLS[2].parameters == {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "offset": {"type": "integer", "minimum": 1, "default": 1},
            "limit": {"type": "integer", "minimum": 1, "default": 500},
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    assert TOOLS[5].parameters["properties"] == {}
    assert all(spec.description for spec in TOOLS)


def test_binary_files_are_skipped_by_grep_and_refused_by_read(tmp_path: Any) -> None:
    (tmp_path / "a.docx").write_bytes(b"PK\x03\x04\xff\xfe payment")
    workspace = Workspace({"a.docx": tmp_path / "a.docx", "b.md": "payment"})
    assert call(workspace, "grep", pattern="payment") == "b.md:payment"
    assert call(workspace, "read", path="a.docx") == "error: not a text file: a.docx"
    assert call(workspace, "grep", pattern="payment", path="a.docx") == "error: not a text file: a.docx"
    workspace.close()


def test_a_machine_that_stands_still_changes_nothing_that_the_policy_reads(
    shared: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = call(shared, "grep", pattern="payment")
    hours = count(1)
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * next(hours))
    monkeypatch.setattr(time, "time", lambda: 3600.0 * next(hours))
    assert call(shared, "grep", pattern="payment") == expected
