"""A model's way to a SageMaker AI endpoint; docs/sagemaker.md tells it from the outside.

checkpoint   what of a model folder belongs into an artefact, and what must not
artefact     what it holds beside the weights, for the AWS vLLM image or for LMI
archive      a tar.gz that is the same every time, written as a stream
instances    which instance types have Hopper GPUs, which images AWS has
calls        a deployment as the calls to AWS that it takes: data, no network
deploy       those calls made, the wait, and what is removed when it fails
"""
