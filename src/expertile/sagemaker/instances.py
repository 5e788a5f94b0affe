"""Which of SageMaker's instance types have Hopper GPUs, and how many; which images AWS has for them."""

from __future__ import annotations

from ..errors import ExpertileError

#: Instance type -> (GPU, how many).
HOPPER = {
    "ml.p5.4xlarge": ("H100", 1),
    "ml.p5.48xlarge": ("H100", 8),
    "ml.p5e.48xlarge": ("H200", 8),
    "ml.p5en.48xlarge": ("H200", 8),
}
#: Account of the Deep Learning Containers. China and GovCloud have others: name the image there.
ACCOUNT = "763104351884"
VLLM_TAG = "server-sagemaker-cuda-v2.2"  # vLLM 0.26.0, CUDA 13
#: Its driver is new enough for CUDA 13.
AMI = "al2023-ami-sagemaker-inference-gpu-4-1"
ELSEWHERE = ("cn-", "us-gov-", "us-iso", "eu-isoe-", "eusc-")


def gpus(instance_type: str, any_instance: bool = False) -> int:
    """GPUs of the instance. ExpertileError when they are not Hoppers, unless any will do: then 1."""
    if instance_type in HOPPER:
        return HOPPER[instance_type][1]
    if not any_instance:
        known = ", ".join(f"{name} ({count} x {gpu})" for name, (gpu, count) in HOPPER.items())
        raise ExpertileError(
            f"instance_type={instance_type!r} has no Hopper GPU, so that nothing of expertile's would run there: "
            f"use {known}, or --any-instance"
        )
    return 1


def vllm_image(region: str) -> str:
    """AWS' vLLM image in a region."""
    if region.startswith(ELSEWHERE):
        raise ExpertileError(
            f"region={region!r} has an account of its own for AWS' images: name the image with --image"
        )
    return f"{ACCOUNT}.dkr.ecr.{region}.amazonaws.com/vllm:{VLLM_TAG}"
