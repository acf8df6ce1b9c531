"""Stop strings are found whatever the tokens, and no text is shown that a stop string takes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.rollout.stops import StopMatcher

CHARACTERS = st.sampled_from("abä€😀")
TEXTS = st.text(CHARACTERS, max_size=40)
STOPS = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=4)


def run(stops: list[str], tokens: list[bytes]) -> tuple[str, str | None, int]:
    """(text, the stop, tokens fed)."""
    matcher, text = StopMatcher(stops), ""
    for n, token in enumerate(tokens):
        text += matcher.feed(token)
        if matcher.stop is not None:
            return text, matcher.stop, n + 1
    return text + matcher.finish(), None, len(tokens)


def naive(stops: list[str], data: bytes) -> tuple[str, str | None, int]:
    """(text, the stop, bytes looked at): the first end at which any stop string is complete, the longest there."""
    for end in range(len(data) + 1):
        if found := [stop for stop in stops if data[:end].endswith(stop.encode())]:
            longest = max(found, key=lambda stop: len(stop.encode()))
            return data[: end - len(longest.encode())].decode("utf-8", "replace"), longest, end
    return data.decode("utf-8", "replace"), None, len(data)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    tokens, start = [], 0
    for length in lengths:
        tokens.append(data[start : start + length])
        start += length
    return [*tokens, data[start:]]


@settings(max_examples=400, deadline=None)
@given(STOPS, TEXTS, st.lists(st.integers(0, 7), max_size=60))
def test_any_tokens_give_what_a_naive_search_gives(stops: list[str], text: str, lengths: list[int]) -> None:
    tokens = cut(text.encode(), lengths)
    got, stop, fed = run(stops, tokens)
    want, want_stop, end = naive(stops, text.encode())
    assert (got, stop) == (want, want_stop)
    if stop is not None:  # found with the very token that completes it
        assert sum(map(len, tokens[: fed - 1])) < end <= sum(map(len, tokens[:fed]))


@settings(max_examples=200, deadline=None)
@given(STOPS, st.binary(max_size=30), st.lists(st.integers(0, 4), max_size=40))
def test_bytes_that_are_no_text_are_replaced_alike(stops: list[str], data: bytes, lengths: list[int]) -> None:
    assert run(stops, cut(data, lengths))[:2] == naive(stops, data)[:2]


@settings(max_examples=200, deadline=None)
@given(STOPS, TEXTS)
def test_just_what_may_still_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher, shown = StopMatcher(stops), ""
    for n, character in enumerate(text):
        shown += matcher.feed(character.encode())
        if matcher.stop is not None:
            break
        so_far = text[: n + 1]
        held = max((k for s in stops for k in range(len(s)) if so_far.endswith(s[:k])), default=0)
        assert matcher.held_characters == held
        assert shown == so_far[: len(so_far) - held]


def test_a_stop_string_split_over_tokens_is_found() -> None:
    assert run(["</answer>"], [b"4", b"2</", b"ans", b"wer> and"]) == ("42", "</answer>", 4)


def test_a_stop_string_inside_one_token_cuts_the_text_only() -> None:
    assert run(["."], [b"One. Two. Three"]) == ("One", ".", 1)


def test_a_false_start_is_given_back() -> None:
    assert run(["aab"], [b"a", b"a", b"a", b"b"]) == ("a", "aab", 4)
    assert run(["abc"], [b"xab", b"d"]) == ("xabd", None, 2)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], [b"abcd"]) == ("a", "bc", 1)
    assert run(["bc", "abc"], [b"x", b"abc"]) == ("x", "abc", 2)


def test_a_character_split_over_tokens_is_shown_whole() -> None:
    matcher = StopMatcher(["!"])
    assert matcher.feed("€".encode()[:1]) == ""
    assert matcher.held_characters == 1
    assert matcher.feed("€".encode()[1:]) == "€"
    assert matcher.held_characters == 0


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert [matcher.feed(b"ab"), matcher.feed(b"c"), matcher.finish()] == ["ab", "c", ""]


def test_an_empty_stop_string_and_text_after_a_stop_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^stop '': "):
        StopMatcher(["a", ""])
    matcher = StopMatcher(["a"])
    matcher.feed(b"a")
    with pytest.raises(ValueError, match="ended at stop 'a'"):
        matcher.feed(b"b")
