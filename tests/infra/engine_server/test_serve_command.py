"""`k3 serve engine`: what it refuses, and a whole life of the process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from flows.cli import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--run, --model: give one of them"),
        (["--run", "a", "--model", "b"], "--run, --model"),
        (["--run", "absent"], "'absent' was never started"),
        (["--run", "a@b"], "expected RUN@STEP"),
        (["--model", "absent"], "absent: expected a folder"),
        (["--model", ".", "--name", "a:b"], "--name"),
        (["--model", ".", "--adapter", "x"], "--adapter: expected NAME=PLACE"),
        (["--model", ".", "--device", "tpu"], "--device: expected cpu"),
        (["--model", ".", "--dtype", "fp16"], "--dtype: expected fp32 or bf16"),
        (["--model", ".", "--record", "absent/record"], "--record: absent is not a folder"),
        (["--model", ".", "--port", "70000"], "--port"),
        (["--model", ".", "--max-running", "0"], "--max-running"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "engine", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert said in lines[0].replace("'--", "--").replace("':", ":"), lines


def test_a_taken_port_is_one_line_and_code_2(
    init_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "engine", "--model", str(init_folder("k3")), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port}: cannot be listened on" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_is_served_recorded_and_ended_with_code_0(
    init_folder: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    folder, record = init_folder("k3"), tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "flows.cli", "serve", "engine", "--model", str(folder), "--port", "0"]
    command += ["--record", str(record), "--name", "mine", "--max-length", "300", "--dtype", dtype]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert server.stdout is not None
        ready = re.fullmatch(r"mine is k3, served at (http://127\.0\.0\.1:\d+)\n", server.stdout.readline())
        assert ready is not None
        with openai.OpenAI(api_key="none", base_url=f"{ready[1]}/v1", max_retries=0) as api:
            assert [model.id for model in api.models.list()] == ["mine"]
            answer = api.chat.completions.create(
                model="mine",
                messages=[{"role": "user", "content": "a"}],
                max_tokens=5,
                extra_body={"return_token_ids": True},
            )
        line = json.loads(record.read_text())
        assert line["prompt_ids"] == answer.prompt_token_ids
        assert line["output_ids"] == answer.choices[0].token_ids
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stdout.read() == ""
    finally:
        server.kill()
        server.wait()
