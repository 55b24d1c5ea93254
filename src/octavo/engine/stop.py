"""Decides after each token whether a request ends, and which bytes of its text may be shown.

It works on token ids and bytes: it knows no tokenizer, no sampler and no client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from octavo.core.records import FinishReason, RepetitionDetection, SamplingParams

REPETITION_DETECTED = "repetition_detected"  # the stop reason, as in vLLM


class StopDecision(NamedTuple):
    released: bytes  # text that is certain now, in order
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop token id or stop string that ended the request; None for EOS


class _StopStringAutomaton:
    """All stop strings in one automaton over bytes (Aho and Corasick, "Efficient string matching", 1975).

    A state is the longest end of the text read so far that begins a stop string. Reading a text takes time linear in
    its length, however many stop strings there are.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._goto: list[dict[int, int]] = [{}]
        depth = [0]
        self.matched: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            state = 0
            # A lone surrogate can be in a JSON string but in no text: it need not match, only do no harm.
            for byte in stop.encode("utf-8", "surrogatepass"):
                if byte not in self._goto[state]:
                    self._goto[state][byte] = len(self._goto)
                    self._goto.append({})
                    depth.append(depth[state] + 1)
                    self.matched.append(None)
                state = self._goto[state][byte]
            self.matched[state] = stop
        self._fail = [0] * len(self._goto)
        self.num_held = [0] * len(self._goto)  # bytes at the end of the text that could go on to be a stop string
        pending = deque([0])
        while pending:
            state = pending.popleft()
            fail = self._fail[state]
            self.matched[state] = self.matched[state] or self.matched[fail]
            self.num_held[state] = depth[state] if self._goto[state] else self.num_held[fail]
            for byte, child in self._goto[state].items():
                self._fail[child] = self.step(fail, byte) if state else 0
                pending.append(child)

    def step(self, state: int, byte: int) -> int:
        while state and byte not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(byte, 0)


_automaton = lru_cache(maxsize=64)(_StopStringAutomaton)  # many requests of one client bring the same strings


class _Repetition:
    """Finds the end of an output to be one pattern several times in a row, in time that the number of sizes takes."""

    def __init__(self, detection: RepetitionDetection) -> None:
        shortest = max(1, detection.min_pattern_size)
        self._sizes = range(shortest, detection.max_pattern_size + 1)
        self._runs = [0] * len(self._sizes)  # how many of the last tokens equal the one `size` before them
        self._wanted = [size * (detection.min_count - 1) for size in self._sizes]
        self._tokens = deque[int](maxlen=detection.max_pattern_size)  # the last one first

    def push(self, token_id: int) -> bool:
        earlier = list(self._tokens)[self._sizes.start - 1 :]
        self._tokens.appendleft(token_id)
        found = False
        for i, token in enumerate(earlier):
            run = self._runs[i] = self._runs[i] + 1 if token == token_id else 0
            found |= run >= self._wanted[i]
        return found


class StopChecker:
    """The stop conditions of one request.

    - A stop string ends it where its last byte arrives. The earliest end in the text wins, whatever tokens it is spread
      over; of several with that end, the longest. The text is cut before the string, or after it with
      include_stop_str_in_output.
    - An EOS token (without ignore_eos) or one of stop_token_ids ends it. Its text is left out, as vLLM does, unless
      include_stop_str_in_output is set; then a stop string that is completed by its visible text takes precedence.
    - A repetition that repetition_detection describes ends it with REPETITION.
    - None of these count while there are fewer than min_tokens output tokens.
    - Otherwise max_tokens, or max_model_len with the prompt, ends it with LENGTH.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], num_prompt_tokens: int, max_model_len: int
    ) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        room = max_model_len - num_prompt_tokens
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._automaton = _automaton(params.stop) if params.stop else None
        self._state = 0
        self._held = b""
        detection = params.repetition_detection
        self._repetition = _Repetition(detection) if detection is not None and detection.max_pattern_size else None

    def push(self, token_id: int, visible_bytes: bytes, num_output_tokens: int) -> StopDecision:
        """Take in a sampled token and the text it adds. `num_output_tokens` counts this token too.

        Not to be called again once a finish_reason has been given.
        """
        counts = num_output_tokens >= self._min_tokens
        is_eos = counts and token_id in self._eos
        is_stop_id = counts and token_id in self._stop_ids and not is_eos
        if (is_eos or is_stop_id) and not self._include_stop:
            visible_bytes = b""
        stop = self._read(visible_bytes, counts)
        if stop is not None:
            return StopDecision(self.flush(), FinishReason.STOP, stop)
        if is_eos or is_stop_id:
            return StopDecision(self.flush(), FinishReason.STOP, token_id if is_stop_id else None)
        if self._repetition is not None and self._repetition.push(token_id) and counts:
            return StopDecision(self.flush(), FinishReason.REPETITION, REPETITION_DETECTED)
        if num_output_tokens >= self._max_tokens:
            return StopDecision(self.flush(), FinishReason.LENGTH, None)
        return StopDecision(self._release(), None, None)

    def flush(self) -> bytes:
        """Release what is held back: the request ends (or was aborted), so it is no beginning of a stop string."""
        released, self._held = self._held, b""
        return released

    def _read(self, text: bytes, counts: bool) -> str | None:
        """Append to the held text up to the end of a stop string, which is returned, and cut off unless included."""
        automaton = self._automaton
        if automaton is None:
            self._held += text
            return None
        for i, byte in enumerate(text):
            self._state = automaton.step(self._state, byte)
            stop = automaton.matched[self._state]
            if stop is not None and counts:
                end = len(self._held) + i + 1
                cut = end if self._include_stop else end - len(stop.encode("utf-8", "surrogatepass"))
                self._held = (self._held + text)[:cut]
                return stop
        self._held += text
        return None

    def _release(self) -> bytes:
        num_held = self._automaton.num_held[self._state] if self._automaton is not None else 0
        cut = len(self._held) - num_held
        released, self._held = self._held[:cut], self._held[cut:]
        return released
