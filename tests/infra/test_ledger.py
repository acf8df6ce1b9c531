import threading
import uuid
from pathlib import Path

import pytest

from infra.ledger import Ledger
from infra.store import Store
from k3core.errors import IntegrityError


def ledger(run: str = "r", root: str | None = None) -> Ledger:
    return Ledger(Store(root or f"memory://{uuid.uuid4().hex}"), run)


def test_what_was_recorded_is_read() -> None:
    book = ledger()
    assert book.get(1) is None
    entry = book.record(1, "aa", {"loss": 0.5, "version": {"sha256": "x"}})
    assert entry == {"run": "r", "step": 1, "batch_sha256": "aa", "result": {"loss": 0.5, "version": {"sha256": "x"}}}
    assert book.get(1) == entry


def test_a_second_try_with_the_same_batch_gets_the_first_result() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    first = ledger(root=root).record(1, "aa", {"loss": 0.5})
    assert ledger(root=root).record(1, "aa", {"loss": 0.7}) == first
    assert ledger(root=root).get(1) == first


def test_another_batch_for_a_step_is_refused_with_both_digests() -> None:
    book = ledger()
    first = book.record(1, "aa", {})
    with pytest.raises(ValueError, match="run 'r' applied step 1 to batch aa, not to bb"):
        book.record(1, "bb", {})
    assert book.get(1) == first


def test_steps_and_runs_are_apart() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    a, b = ledger("a", root), ledger("b", root)
    a.record(1, "aa", {})
    a.record(3, "cc", {})
    b.record(1, "bb", {})
    assert [entry["batch_sha256"] for entry in a.entries(3)] == ["aa", "cc"]
    assert [entry["batch_sha256"] for entry in a.entries(2)] == ["aa"]
    assert [entry["batch_sha256"] for entry in b.entries(9)] == ["bb"]


def test_tries_at_once_agree_on_one_result(tmp_path: Path) -> None:
    entries: list[dict] = []
    barrier = threading.Barrier(6)

    def attempt(number: int) -> None:
        book = ledger(root=str(tmp_path))
        barrier.wait()
        entries.append(book.record(1, "aa", {"by": number}))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries) == 6
    assert all(entry == entries[0] for entry in entries)


class OtherTryIsFaster(Store):
    """Another process records between this one's look and its commit."""

    def commit(self, key: str, document: object) -> object:  # type: ignore[override]
        Ledger(Store(self._root), "r").record(1, "theirs", {"loss": 1.0})
        return super().commit(key, document)  # type: ignore[arg-type]


def test_a_lost_race_with_another_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch theirs, not to ours"):
        Ledger(OtherTryIsFaster(str(tmp_path)), "r").record(1, "ours", {"loss": 2.0})


def test_a_lost_race_with_the_same_batch_gets_the_winners_result(tmp_path: Path) -> None:
    entry = Ledger(OtherTryIsFaster(str(tmp_path)), "r").record(1, "theirs", {"loss": 2.0})
    assert entry["result"] == {"loss": 1.0}


def test_a_result_that_is_no_number_is_refused_and_not_recorded() -> None:
    book = ledger()
    with pytest.raises(ValueError, match="ledger of run 'r', step 1: result: "):
        book.record(1, "aa", {"loss": float("nan")})
    assert book.get(1) is None


def test_a_flipped_bit_anywhere_in_an_entry_is_refused_by_name(tmp_path: Path) -> None:
    book = ledger(root=str(tmp_path))
    book.record(1, "aa", {"loss": 0.5})
    path = tmp_path / "r/ledger/000001.json"
    intact = path.read_bytes()
    for position in range(len(intact)):
        altered = bytearray(intact)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        with pytest.raises(IntegrityError, match=f"^file://{path}: "):
            book.record(1, "aa", {"loss": 0.5})
