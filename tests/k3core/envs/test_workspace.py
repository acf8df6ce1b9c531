"""Nothing leads out of a workspace, and a fault of ours is never the policy's."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3core.envs import workspace as workspaces
from k3core.envs.environment import InfrastructureError
from k3core.envs.workspace import ToolError, Workspace, WorkspaceLimits


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    workspace = Workspace({"nda.md": "NDA with Acme\n", "annex/a.md": "annex\n"})
    yield workspace
    workspace.close()


ESCAPES = [
    "",
    "..",
    "../x",
    "a/../../x",
    "annex/../nda.md",
    "/etc/passwd",
    "//etc/passwd",
    "nda.md\0",
    "a\nb",
    "a\u2028b",
    "..\\x",
    "\ud800",
    "x" * 256,
    "é" * 128,
    "/".join(["d"] * 17),
    "a/" * 300 + "x",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leads_outside(workspace: Workspace, path: str) -> None:
    for act in (workspace.read, workspace.files, lambda path: workspace.write(path, "x")):
        with pytest.raises(ToolError, match="bad path"):
            act(path)
    assert workspace.files() == ("annex/a.md", "nda.md")


@pytest.mark.parametrize("path", ["link", "link/x.md", "inner", "annex/up/x.md"])
def test_links_are_not_followed_even_when_made_later(workspace: Workspace, tmp_path: Path, path: str) -> None:
    (tmp_path / "x.md").write_text("secret")
    root = workspace.resolve("nda.md")[1].parent
    (root / "link").symlink_to(tmp_path)
    (root / "inner").symlink_to(root / "nda.md")
    (root / "annex" / "up").symlink_to("../..")
    for act in (workspace.read, workspace.files, lambda path: workspace.write(path, "x")):
        with pytest.raises(ToolError, match="not a regular file"):
            act(path)
    assert workspace.files() == ("annex/a.md", "nda.md")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["secret"]


def test_a_link_made_between_check_and_open_is_not_followed(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    root = workspace.resolve("nda.md")[1].parent
    (root / "late").symlink_to(secret)
    monkeypatch.setattr(workspace, "resolve", lambda path: (path, root / path))
    with pytest.raises(ToolError, match="not a regular file"):
        workspace.read("late")


def test_a_pipe_is_refused_and_does_not_hang(workspace: Workspace) -> None:
    os.mkfifo(workspace.resolve("pipe")[1])
    with pytest.raises(ToolError, match="not a regular file"):
        workspace.read("pipe")


@pytest.mark.parametrize(
    ("path", "message"),
    [("memo.md", "no such file: memo.md"), ("annex", "not a regular file"), ("nda.md/x", "not a directory")],
)
def test_reading_what_is_no_file_is_the_policys_fault(workspace: Workspace, path: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        workspace.read(path)


@pytest.mark.parametrize(
    ("path", "message"), [("annex", "is a directory"), (".", "is a directory"), ("nda.md/x", "not")]
)
def test_writing_over_a_folder_or_below_a_file_is_the_policys_fault(
    workspace: Workspace, path: str, message: str
) -> None:
    with pytest.raises(ToolError, match=message):
        workspace.write(path, "x")


def test_what_was_written_is_read_back_exactly(workspace: Workspace) -> None:
    text = "a\r\nb\x00é\u2028"
    assert workspace.write("./new//memo.md", text) == "new/memo.md"
    assert workspace.read("new/memo.md") == text
    workspace.write("new/memo.md", "")
    assert workspace.read("new/memo.md") == ""


def test_sizes_are_bounded() -> None:
    workspace = Workspace({"big.md": "x" * 100}, WorkspaceLimits(max_file_bytes=10, max_files=2))
    with pytest.raises(ToolError, match="larger than 10 bytes"):
        workspace.write("memo.md", "é" * 6)
    workspace.write("memo.md", "é" * 5)
    with pytest.raises(ToolError, match="more than 2 files"):
        workspace.write("more.md", "x")
    workspace.write("memo.md", "again")
    workspace.close()


def test_a_write_that_fails_half_way_leaves_the_old_file(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InfrastructureError, match="No space left"):
        workspace.write("nda.md", "half")
    assert workspace.read("nda.md") == "NDA with Acme\n"
    assert workspace.files() == ("annex/a.md", "nda.md")


def test_a_workspace_that_is_gone_is_our_fault() -> None:
    workspace = Workspace({"nda.md": "NDA"})
    shutil.rmtree(workspace.resolve("nda.md")[1].parents[1])
    for act in (
        lambda: workspace.read("nda.md"),
        lambda: workspace.read("never-there.md"),
        lambda: workspace.write("memo.md", "x"),
        lambda: workspace.files(),
    ):
        with pytest.raises(InfrastructureError):
            act()
    workspace.close()


def test_a_single_file_that_vanishes_is_our_fault(workspace: Workspace) -> None:
    shutil.rmtree(workspace.resolve("annex")[1])
    for act in (
        lambda: workspace.read("annex/a.md"),
        lambda: workspace.files(),
        lambda: workspace.files("annex"),
        lambda: workspace.files("annex/a.md"),
    ):
        with pytest.raises(InfrastructureError):
            act()
    assert workspace.read("nda.md") == "NDA with Acme\n"


def test_a_document_that_cannot_be_laid_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"document '\.\./x': bad path"):
        Workspace({"../x": "x"})
    with pytest.raises(InfrastructureError, match=r"document a\.docx: .* is gone"):
        Workspace({"a.docx": tmp_path / "gone.docx"})


def test_closing_removes_everything_and_may_be_repeated() -> None:
    workspace = Workspace({"nda.md": "NDA"})
    home = workspace.resolve("nda.md")[1].parents[1]
    assert home.is_dir()
    workspace.close()
    assert not home.exists()
    workspace.close()


def test_workspaces_lie_in_memory_where_there_is_room_and_nobody_named_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, named = tmp_path / "memory", tmp_path / "named"
    memory.mkdir()
    named.mkdir()
    monkeypatch.setattr(workspaces, "MEMORY_FOLDER", str(memory))
    monkeypatch.setattr(workspaces, "LEAST_MEMORY_BYTES", 1)
    monkeypatch.delenv("TMPDIR", raising=False)

    def home() -> Path:
        workspace = Workspace({"nda.md": "NDA"})
        workspace.close()
        return workspace.resolve("nda.md")[1].parents[2]

    assert home() == memory
    monkeypatch.setattr(workspaces, "LEAST_MEMORY_BYTES", 1 << 62)
    assert home() != memory
    monkeypatch.setattr(workspaces, "LEAST_MEMORY_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is asked once
    monkeypatch.setenv("TMPDIR", str(named))
    assert home() == named
