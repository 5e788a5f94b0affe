"""The step loop, in a thread of its own: fill prompts in, then compute everybody's next token in one batch.

transformers' own continuous batching runs on a CPU too, but without flash-attention each token there is computed
against the keys of all requests under a mask (tiny-moe, 64 prompts of 200 tokens, two cores: 230 tokens/s, this loop
350 to 400); it knows no seed per request, and an exception in its loop fails every request that it has.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from ..errors import ExpertileError
from .metrics import Metrics
from .model import LanguageModel
from .sequences import Event, Sequence

log = logging.getLogger("expertile.serve")
Delivery = list[tuple[Sequence, Event]]


class QueueFull(ExpertileError):
    """No room for more sequences: try again later."""


class EngineStopped(ExpertileError):
    """The engine takes no requests any more."""


class Engine:
    """Continues sequences. `submit` and `cancel` may be called from any thread.

    active    sequences that get a token each step; active[i] has row i of the cache
    filling   the one whose prompt is being taken in; its row is the one behind
    broken    why nothing can be computed any more; "" while all is well
    """

    def __init__(
        self, model: LanguageModel, metrics: Metrics, deliver: Callable[[Delivery], None], *, max_queue: int,
        prefill_chunk: int,
    ):  # fmt: skip
        self.model, self.metrics, self.max_queue, self.prefill_chunk = model, metrics, max_queue, prefill_chunk
        self.slots = model.cache.rows
        self.active: list[Sequence] = []
        self.filling: Sequence | None = None
        self.waiting: deque[Sequence] = deque()
        self.broken = ""
        self._deliver, self._out = deliver, []
        self._lock, self._wake, self._stopping = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="expertile-engine", daemon=True)

    @property
    def running(self) -> int:
        return len(self.active) + (self.filling is not None)

    @property
    def stopped(self) -> bool:
        """Whether no request is taken any more, and those under way have failed by no fault of theirs."""
        return bool(self.broken) or self._stopping

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the loop; what is under way gets an error."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, sequences: list[Sequence]) -> None:
        """All of them or none. QueueFull when they do not fit, EngineStopped when there is no engine any more."""
        with self._lock:
            if self.stopped:
                raise EngineStopped(self.broken or "the server is shutting down")
            free = self.slots - self.running
            if len(self.waiting) + len(sequences) > self.max_queue + max(0, free):
                raise QueueFull(f"{len(self.waiting)} requests are waiting already, at most {self.max_queue} may")
            self.waiting.extend(sequences)
        self._wake.set()

    def cancel(self, sequences: list[Sequence]) -> None:
        for each in sequences:
            each.cancelled = True
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._step():
                    self._wake.wait()
                    self._wake.clear()
            self._fail_everything("the server is shutting down")
        except Exception as error:
            log.exception("the engine has stopped")
            with self._lock:
                self.broken = f"the engine has stopped: {type(error).__name__}"
            self._fail_everything(self.broken)

    def _step(self) -> bool:
        """One token for everybody; False when there was nothing to do."""
        self._drop_cancelled()
        budget = self.prefill_chunk
        while budget > 0 and self._next_prompt():
            budget -= self._fill(budget)
        if self.active:
            self._decode()
        worked = bool(self._out) or self.filling is not None
        self._flush()
        return worked

    def _drop_cancelled(self) -> None:
        with self._lock:
            dropped = [each for each in self.waiting if each.cancelled]
            if dropped:
                self.waiting = deque(each for each in self.waiting if not each.cancelled)
        running = [*self.active, *([self.filling] if self.filling else [])]
        for each in [*dropped, *(each for each in running if each.cancelled)]:
            self._finish(each, Event("", each.tokens, "cancelled"))

    def _next_prompt(self) -> bool:
        with self._lock:
            if self.filling is None and self.waiting and len(self.active) < self.slots:
                self.filling = self.waiting.popleft()
                self.filling.begin(self.model.decode)
        return self.filling is not None

    def _fill(self, budget: int) -> int:
        """Takes in up to `budget` tokens of the prompt, and the first token of the answer when it is through."""
        sequence = self.filling
        chunk = sequence.prompt[sequence.filled : sequence.filled + budget]
        [found] = self._compute(len(self.active), [sequence], [chunk])
        if isinstance(found, Exception):
            self._fail(sequence, found)
            return len(chunk)
        sequence.filled += len(chunk)
        if not sequence.is_filling:
            self.active.append(sequence)
            self.filling = None
            self._take(sequence, found)
        return len(chunk)

    def _decode(self) -> None:
        sequences = list(self.active)
        found = self._compute(0, sequences, [[each.last] for each in sequences])
        for sequence in sequences:
            sequence.filled += 1  # of all before any leaves, for then rows move with what they have been filled with
        for sequence, logits in zip(sequences, found, strict=True):
            if isinstance(logits, Exception):
                self._fail(sequence, logits)
            else:
                self._take(sequence, logits)

    def _take(self, sequence: Sequence, logits: torch.Tensor) -> None:
        try:
            event = sequence.take(sequence.sampler.pick(logits))
        except Exception as error:
            self._fail(sequence, error)
            return
        self.metrics.token(sequence)
        if event.finish:
            self._finish(sequence, event)
        else:
            self._out.append((sequence, event))

    def _compute(self, first_row: int, sequences: list[Sequence], ids: list[list[int]]) -> list:
        """Logits for each sequence. When a batch fails, each is tried alone; who fails then gets the exception."""
        starts = [each.filled for each in sequences]
        try:
            return list(self.model.step(first_row, ids, starts))
        except torch.AcceleratorError:
            raise  # the device itself is lost, and everybody's keys and values with it
        except Exception as error:
            if len(sequences) == 1:
                return [error]
        rows = range(first_row, first_row + len(sequences))
        return [
            self._compute(*each)[0] for each in zip(rows, [[s] for s in sequences], [[i] for i in ids], strict=True)
        ]

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        log.error("a request failed: %s", type(error).__name__, exc_info=error)
        reason = str(error) if isinstance(error, ExpertileError) else "the model failed on this request"
        self._finish(sequence, Event("", sequence.tokens, "error", reason))

    def _finish(self, sequence: Sequence, event: Event) -> None:
        self._release(sequence)
        self.metrics.finished(sequence, event.finish)
        self._out.append((sequence, event))

    def _release(self, sequence: Sequence) -> None:
        """Frees its row. The last one moves into the hole, so that rows in use stay next to one another."""
        if sequence is self.filling:
            self.filling = None
        if sequence not in self.active:
            return
        hole, last = self.active.index(sequence), len(self.active) - 1
        if hole != last:
            self.model.cache.move(last, hole, self.active[last].filled)
            self.active[hole] = self.active[last]
        self.active.pop()
        if self.filling:
            self.model.cache.move(last + 1, last, self.filling.filled)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out:
            self._deliver(out)

    def _fail_everything(self, reason: str) -> None:
        with self._lock:
            left, self.waiting = [*self.waiting], deque()
        left += [*self.active, *([self.filling] if self.filling else [])]
        self.active, self.filling = [], None
        for each in left:
            self._out.append((each, Event("", each.tokens, "error", reason)))
            self.metrics.finished(each, "error")
        self._flush()
