"""Weights and tokenizer from a folder, and the forward pass of one step."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from ..errors import ExpertileError, UnsupportedProblem
from ..plugins import transformers as plugin
from ..problem import Problem, Quant
from ..runtime.device import detect
from ..warming import turning_points
from .cache import SlotCache, causal_mask
from .checkpoint import check_config, check_files, check_tensors, in_words, load_tokenizer
from .settings import LARGEST_CONTEXT, Settings

LAYER_TYPES = {"full_attention", "sliding_attention"}


class LanguageModel:
    """A causal language model with our experts, its tokenizer, and room in a cache for max_seqs sequences.

    context   most tokens of a sequence, prompt and answer together
    ends      tokens that end a text
    encode    text -> token ids, with the special tokens that the tokenizer adds
    decode    token ids -> text, without special tokens
    """

    def __init__(self, network, tokenizer, settings: Settings):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedProblem(f"{type(tokenizer).__name__} has no fast tokenizer: tokenizer.json is needed")
        self.network, self.tokenizer, self.config = network, tokenizer, network.config.get_text_config()
        self.quant = Quant(settings.quant)
        self.context = _context(self.config, settings.max_len)
        self.vocabulary = network.get_input_embeddings().num_embeddings
        self.ends = _ends(network)
        self.cache = SlotCache(settings.max_seqs, self.context)
        self.windows = _windows(self.config)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend  # its own calls, unlike the tokenizer's, change no state: threads may share it
        self.longest_text = self.context * max(map(len, backend.get_vocab()))

    @classmethod
    def load(cls, settings: Settings, device: str | None = None) -> LanguageModel:
        """From safetensors only; code of the model's own runs only with trust_remote_code.

        Raises    UnsupportedProblem, with the reason, for a model that cannot be served
        """
        disable_progress_bar()
        check_files(settings.model)
        check_config(settings.model)
        trust = dict(trust_remote_code=settings.trust_remote_code, local_files_only=True)
        device = device or ("cuda" if detect().is_hopper else "cpu")
        try:
            config = AutoConfig.from_pretrained(settings.model, **trust)
            tokenizer = load_tokenizer(settings.model, **trust)
            network, info = AutoModelForCausalLM.from_pretrained(
                settings.model, config=config, dtype=settings.dtype, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True, **trust,
            )  # fmt: skip
            check_tensors(settings.model, info, network)
            model = cls(plugin.use(network.to(device).eval(), settings.quant), tokenizer, settings)
            model.step(0, [[0]], [0])  # what of config.json does not fit together may show only here
        except ExpertileError:
            raise
        except Exception as error:  # files from elsewhere lead others' code to any
            raise UnsupportedProblem(
                f"{settings.model} cannot be loaded: {in_words(error)}; {_advice(error)}"
            ) from error
        return model

    @property
    def device(self) -> torch.device:
        return self.network.device

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=True)

    @torch.inference_mode()
    def step(self, first_row: int, ids: list[list[int]], starts: list[int]) -> torch.Tensor:
        """Logits [n, vocabulary], fp32, behind the last of the tokens ids [n, q] at starts[i] ... starts[i] + q - 1.

        Their keys and values go to rows first_row ... first_row + n - 1 of the cache.
        """
        length = len(ids[0])
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(length, device=self.device)
        longest = max(starts) + length
        self.cache.begin(first_row, positions, longest)
        masks = {
            name: causal_mask(positions, longest, self.network.dtype, window) for name, window in self.windows.items()
        }
        out = self.network(
            input_ids=tokens, attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return out.logits[:, -1].float()

    def experts(self) -> list[tuple[str, torch.nn.Module]]:
        """Name and module of every layer of routed experts, whose projections have three dimensions."""
        return [
            (name, each)
            for name, each in self.network.named_modules()
            if getattr(getattr(each, "down_proj", None), "ndim", 0) == 3
        ]

    @property
    def top_k(self) -> int:
        found = [getattr(self.config, name, None) for name in ("num_experts_per_tok", "moe_k", "moe_topk")]
        return next((k for k in found if isinstance(k, int)), 1)


def _context(config, wanted: int | None) -> int:
    longest = getattr(config, "max_position_embeddings", None) or LARGEST_CONTEXT
    if longest < 2:
        raise UnsupportedProblem(
            f"max_position_embeddings={longest} in config.json: a prompt and an answer are 2 tokens"
        )
    if wanted is not None and wanted > longest:
        raise UnsupportedProblem(f"max_len={wanted}: the model's context is {longest} tokens")
    return wanted or min(longest, LARGEST_CONTEXT)


def _ends(network) -> frozenset[int]:
    found = network.generation_config.eos_token_id
    found = network.config.eos_token_id if found is None else found
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def _windows(config) -> dict[str, int | None]:
    """Kind of attention -> how many tokens it looks back, None for all."""
    kinds = set(getattr(config, "layer_types", None) or [])
    if strange := kinds - LAYER_TYPES:
        raise UnsupportedProblem(
            f"layers of type {', '.join(sorted(strange))} keep more than keys and values: the embedded engine serves "
            "full and sliding attention"
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds:
        return {"full_attention": None, "sliding_attention": window}
    return {"full_attention": None if kinds else window}


def _advice(error: Exception) -> str:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return "give less --max-seqs or --max-len, if config.json is right"
    return "config.json, tokenizer and weights must be whole and of one model"


def warm_up(model: LanguageModel, max_tokens: int) -> None:
    """Describes every layer's weights, then runs each number of tokens up to max_tokens that asks for kernels of its
    own, so that no later step compiles any.

    Raises    UnsupportedProblem for experts that we do not compute
    """
    hardware, counts = detect(model.device), {1, 2}
    for problem, split_scale in {_problem(model, module) for _, module in model.experts()}:
        counts |= set(turning_points(problem, hardware, max_tokens, split_scale))
    for tokens in sorted(counts):
        if tokens <= model.cache.rows:  # as when so many sequences get a token each
            model.step(0, [[0]] * tokens, [0] * tokens)
        if tokens <= model.context:  # as when so many tokens of a prompt are taken in
            model.step(0, [[0] * tokens], [0])


def _problem(model: LanguageModel, module) -> tuple[Problem, bool]:
    weights = weights_of(model, module)
    return weights.problem(1, model.top_k), weights.split_scale


def weights_of(model: LanguageModel, module):
    """The Weights that calls of this layer use."""
    return plugin.weights_of(module, model.quant, model.network.dtype)
