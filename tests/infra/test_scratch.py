from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from infra.scratch import scratch_folder


def test_a_folder_is_gone_at_the_end_however_that_comes(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "new", ".x-") as folder:
        (folder / "large").touch()
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from infra.scratch import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1]), '.x-') as folder:\n"
        "    print(folder, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    with scratch_folder(tmp_path, ".x-") as folder:
        assert set(tmp_path.iterdir()) == {left, folder}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert left.exists()
    with scratch_folder(tmp_path, ".x-") as folder:
        assert set(tmp_path.iterdir()) == {folder}
