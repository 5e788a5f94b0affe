"""What a layer of vLLM finds in a worker: a current config, a group of one rank, a workspace."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="session")
def engine():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
        config = VllmConfig()
        with set_current_vllm_config(config):
            workspace.init_workspace_manager(torch.device("cpu"))
            yield config
