"""One vLLM engine in a process of its own, and what it is asked to do: serve a load, or continue and score texts.

The parent sends (verb, arguments) through a pipe and gets ("done", result) or ("failed", text). What vLLM prints goes
to a file. The engine runs inside the process (no second one for its core): a step returns when its tokens are there.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: In an arm's environment: our kernels are specialised on every argument there (bench/specialised.py).
SPECIALISED = "EXPERTILE_BENCH_SPECIALISED"
ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Load:
    """What arrives: `requests` prompts of `input` tokens, each continued by `output` tokens, `batch` of them at a time.

    rate      requests a second by a Poisson process instead (batch 0); then lengths, (input, output), are drawn from
    """

    batch: int
    input: int
    output: int
    requests: int
    rate: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        if self.rate:
            return f"poisson {self.rate:g}/s, {self.requests} requests"
        return f"batch {self.batch}, {self.input} in, {self.output} out"


def main(pipe, environment: Mapping[str, str], arguments: Mapping[str, Any], log: str) -> None:
    """The process's life: start the engine, then answer until told to stop."""
    os.environ.update({**ALWAYS, **environment})
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if environment.get(SPECIALISED) == "1":
            from .specialised import specialise

            specialise()
        engine = Engine(arguments)
        pipe.send(("done", engine.describe()))
        while (asked := pipe.recv()) is not None:
            verb, given = asked
            pipe.send(("done", getattr(engine, verb)(*given)))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        pipe.send(("failed", traceback.format_exc(limit=-3)))
    sys.stdout.flush()


def layers_taken(model) -> tuple[int, int]:
    """(layers of routed experts that expertile computes, such layers in all)."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {id(method): getattr(method, "moe_kernel", None) for method in methods}  # a layer has it in two modules
    homes = [type(kernel.fused_experts).__module__ for kernel in kernels.values() if kernel is not None]
    return sum(home.startswith("expertile.") for home in homes), len(homes)


class Engine:
    def __init__(self, arguments: Mapping[str, Any]):
        start = time.perf_counter()
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.vocabulary = self.engine.model_config.get_vocab_size()
        self.start_s = time.perf_counter() - start
        self.count = 0

    def describe(self) -> dict:
        ours, all_layers = self.llm.apply_model(layers_taken)[0]
        return {"vllm": self.vllm.__version__, "start_s": self.start_s, "ours": ours, "layers": all_layers}

    def serve(self, load: Load, seed: int) -> dict:
        """Serves the load; times in seconds from a request's arrival to its first, and on to its last token."""
        chance = random.Random(seed)
        arrivals = self._arrivals(load, chance)
        waiting, running, done = list(reversed(arrivals)), {}, []
        start = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - start
            while waiting and (waiting[-1][0] <= now if load.rate else len(running) < load.batch):
                due, prompt, output = waiting.pop()
                running[self._add(prompt, output)] = _Times(start + due if load.rate else time.perf_counter(), output)
            if not running:
                time.sleep(max(0.0, waiting[-1][0] - (time.perf_counter() - start)))
                continue
            done += self._step(running)
        return _summary(done, time.perf_counter() - start)

    def _arrivals(self, load: Load, chance: random.Random) -> list[tuple[float, list[int], int]]:
        found, due = [], 0.0
        for _ in range(load.requests):
            due += chance.expovariate(load.rate) if load.rate else 0.0
            given, output = chance.choice(load.lengths) if load.lengths else (load.input, load.output)
            found.append((due, [chance.randrange(10, self.vocabulary - 10) for _ in range(given)], output))
        return found

    def _add(self, prompt: list[int], output: int) -> str:
        from vllm.sampling_params import RequestOutputKind

        self.count += 1
        name = f"request-{self.count}"
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self, running: dict[str, _Times]) -> list[_Times]:
        """One step of the engine; the requests that it finished."""
        outputs = self.engine.step()
        now, done = time.perf_counter(), []
        for output in outputs:
            times, new = running[output.request_id], len(output.outputs[0].token_ids)
            if new:
                times.tokens, times.first, times.last = times.tokens + new, times.first or now, now
            if output.finished:
                if times.tokens != times.wanted:
                    raise RuntimeError(f"{output.request_id}: {times.tokens} tokens, {times.wanted} were wanted")
                done.append(running.pop(output.request_id))
        return done

    def continue_greedily(self, prompts: list[list[int]], tokens: int, at_once: int) -> list[list[tuple[int, float]]]:
        """(token, log-probability) of each greedy continuation, `at_once` prompts in one batch."""
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        found = []
        for first in range(0, len(prompts), at_once):
            batch = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + at_once]]
            for output in self.llm.generate(batch, params, use_tqdm=False):
                best = output.outputs[0]
                pairs = zip(best.token_ids, best.logprobs, strict=True)
                found.append([(token, each[token].logprob) for token, each in pairs])
        return found

    def score(self, texts: list[list[int]], at_once: int) -> list[list[float]]:
        """Log-probability of each token of each text but the first, given those before it."""
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        found = []
        for first in range(0, len(texts), at_once):
            batch = [{"prompt_token_ids": text} for text in texts[first : first + at_once]]
            for text, output in zip(
                texts[first : first + at_once], self.llm.generate(batch, params, use_tqdm=False), strict=True
            ):
                pairs = zip(text[1:], output.prompt_logprobs[1:], strict=True)
                found.append([each[token].logprob for token, each in pairs])
        return found


@dataclass
class _Times:
    """One request: when it arrived, when its first and last token were there."""

    arrival: float
    wanted: int
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def _summary(done: list[_Times], seconds: float) -> dict:
    """Tokens a second, and percentiles over requests of the time to the first token and of that between tokens."""
    first = sorted(times.first - times.arrival for times in done)
    each = sorted((times.last - times.first) / (times.tokens - 1) for times in done if times.tokens > 1)
    ms = lambda values, share: 1e3 * values[round(share * (len(values) - 1))] if values else 0.0
    return {
        "output_tokens_per_s": sum(times.tokens for times in done) / seconds, "ttft_ms_p50": ms(first, 0.5),
        "ttft_ms_p99": ms(first, 0.99), "tpot_ms_p50": ms(each, 0.5), "tpot_ms_p99": ms(each, 0.99), "seconds": seconds,
    }  # fmt: skip
