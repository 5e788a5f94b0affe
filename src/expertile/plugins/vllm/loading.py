"""Taking a layer; once its weights are there, describing them and compiling ahead; if it fails, vLLM's own experts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel as mk

from ...errors import ExpertileError, UnsupportedProblem
from ...guard import warm as compile_variants
from ...plans import Backend
from ...policy import explain
from ...warming import variants, warm
from . import log
from .experts import ExpertileExperts, call_experts_alone
from .formats import Format
from .planner import Planner
from .sealing import Seal

TELL_S = 10.0  # seconds between two lines of progress


def take_over(method, found: Format, seal: Seal) -> None:
    """Makes a quantisation method of vLLM build our experts. Its weights stay as its Triton backend has them."""
    triton = type(getattr(method, found.backend)).TRITON  # converts nothing
    stock = method.process_weights_after_loading

    def process_weights_after_loading(layer):
        stock(layer)
        after_loading(method, layer, seal)

    setattr(method, found.backend, triton)
    method.experts_cls = ExpertileExperts
    method.process_weights_after_loading = process_weights_after_loading


def after_loading(method, layer, seal: Seal) -> None:
    """Checks the weights and compiles what will be asked for; if that fails, the layer goes back to vLLM.

    The first call describes them again, where they are then.
    """
    experts = getattr(method.moe_kernel, "fused_experts", None)
    if not isinstance(experts, ExpertileExperts):
        return
    experts.seal = seal
    try:
        experts.prepare(layer.w13_weight, layer.w2_weight)
        compile_ahead(experts, layer)
        call_experts_alone(method.moe_kernel)
        experts.weights = None  # they may be temporary tensors, which vLLM copies to the layer's own: layerwise reloads
    except Exception:
        log.warning(
            "expertile gives %s back to vLLM (Triton): it failed while loading", layer.layer_name, exc_info=True
        )
        give_back(method)


def give_back(method) -> None:
    """The same weights, in the layout they have, by vLLM's own Triton experts."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    kernel = method.moe_kernel
    experts = TritonExperts(moe_config=kernel.fused_experts.moe_config, quant_config=kernel.fused_experts.quant_config)
    method.experts_cls = TritonExperts
    method.moe_kernel = mk.FusedMoEKernel(kernel.prepare_finalize, experts)


def most_tokens(config) -> int:
    """Tokens that one step of this engine can bring to a layer: data- and context-parallel ranks gather theirs."""
    parallel = config.moe_parallel_config
    return config.max_num_tokens * parallel.dp_size * parallel.pcp_size


def compile_ahead(experts: ExpertileExperts, layer) -> None:
    """Every kernel variant up to most_tokens, once for all layers of one shape in this process."""
    config, device = experts.moe_config, experts.weights.device
    plans = experts.planner(config.experts_per_token, layer.global_num_experts)
    most = most_tokens(config)
    if plans.warmed >= most:
        return
    if device.type == "cuda" and plans.plan(1).backend is not Backend.TRITON:
        raise UnsupportedProblem(f"its kernels cannot run here:\n{explain(plans.plan(1))}")
    started = told = time.monotonic()

    def report(done: int, of: int) -> None:
        nonlocal told
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            log.info("expertile compiles for up to %d tokens: %d of %d, %.0f s", most, done, of, told - started)

    with default_dtype(torch.float32):
        if device.type == "cuda":
            compile_side_by_side(experts, plans, most, layer.expert_map is not None)
        points = warm(
            experts.weights, config.experts_per_token, most, expert_map=layer.expert_map, hardware=plans.hardware,
            report=report,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a launch that fails does so here
        torch.cuda.empty_cache()
    plans.warmed = most
    log.info("expertile is warm for up to %d tokens: %d calls, %.1f s", most, len(points), time.monotonic() - started)


def compile_side_by_side(experts: ExpertileExperts, plans: Planner, most: int, mapped: bool) -> None:
    """Every variant at once, on several threads. The calls that follow find them, and are the judge if this fails."""
    try:
        asked = variants(plans.problem, plans.hardware, most, experts.weights.split_scale, mapped)
        compile_variants(asked, workers=min(8, os.cpu_count() or 1), progress=False)
    except ExpertileError as error:
        log.warning("expertile compiles its kernels one after the other: %s", error)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """vLLM loads under the model's dtype as torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
