"""`k3 parity`: every way on this machine, and what it says of a broken one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import flows.parity
from flows.cli import main
from k3core.model.state import SlotState
from k3core.parity import WAYS, Parity


def row(printed: str, way: str) -> list[str]:
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(way)]
    return line.split()[-7:]  # tokens, and for each type: logprobs, routes, largest


def test_every_way_of_the_engine_gives_the_trainers_bits_in_both_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "parity.json"
    assert main(["parity", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed, "the table is cut"
    for way in WAYS:
        assert row(printed, way)[1:] == ["0"] * 6
    written = json.loads(out.read_text())
    assert written["holds"]
    assert {name: [case["name"] for case in cases] for name, cases in written["cases"].items()} == {
        "fp32": list(WAYS),
        "bf16": list(WAYS),
    }
    assert all(case["is_taken"] and case["num_tokens"] > 100 for cases in written["cases"].values() for case in cases)
    chosen, replayed = written["replay_gap"]
    assert chosen["num_routes_differing"] > 0 == replayed["num_routes_differing"]
    assert 0 < replayed["mean_abs"] < chosen["mean_abs"]


def test_a_cached_state_that_comes_back_changed_is_named_by_its_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = SlotState.restore

    def restore_another(state: SlotState, checkpoint: int, slot: int, length: int) -> None:
        restore(state, checkpoint, slot, length)
        state.slots.states_NLHKV[slot] *= 1 + 2**-20

    monkeypatch.setattr(SlotState, "restore", restore_another)
    assert main(["parity", "--dtype", "fp32"]) == 1
    printed = capsys.readouterr().out
    assert "fp32, warm: same prompts: " in printed
    assert "fp32, warm: a second turn: " in printed
    assert "of 160 logprobs differ, by up to " in printed
    for way in ("cold, one at a time", "batched", "in pieces", "mixed adapters"):
        assert f"fp32, {way}" not in printed


def test_a_way_that_was_not_taken_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of less than a page are never found in the cache."""
    monkeypatch.setattr(flows.parity, "Parity", partial(Parity, num_sequences=3, prompt_tokens=(1, 2)))
    assert main(["parity", "--dtype", "fp32"]) == 1
    printed = capsys.readouterr().out
    assert "fp32, warm: same prompts: the way was not taken (0 cached), so it shows nothing" in printed
    assert "logprobs differ" not in printed


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--preset", "tini"], "tini: no such file or folder, and not a preset (tiny, kimi-linear-48b-a3b, kimi-k3)"),
        (["--preset", "kimi-k3"], "--preset kimi-k3: its weights take "),
        (["--dtype", "fp16"], "k3 parity: Invalid value for --dtype: expected fp32 or bf16, got 'fp16'."),
        (["--device", "tpu"], "k3 parity: Invalid value for --device: expected cpu or cuda, got 'tpu'."),
        (["--json", "no/such/file"], "--json no/such/file: "),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
