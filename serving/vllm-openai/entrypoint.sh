#!/bin/sh
# Puts packed kernels into Triton's cache, then becomes `expertile` with the container's arguments.
#
# EXPERTILE_KERNELS   a file of `expertile cache pack`; one in the artefact, kernels.cache, comes first
# A file that is damaged or made for another Triton or GPU is said so and not used: kernels are then compiled at start.
set -eu

for kernels in "${SAGEMAKER_MODEL_PATH:-/opt/ml/model}/kernels.cache" "${EXPERTILE_KERNELS:-}"; do
    if [ -n "$kernels" ] && [ -f "$kernels" ]; then
        expertile cache unpack "$kernels" >&2 || echo "entrypoint: $kernels is not used, kernels are compiled" >&2
        break
    fi
done

exec expertile "${@:-serve}"
