"""A deployment as the calls to AWS that it takes, in their order. Data only: nothing here talks to anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ExpertileError
from .artefact import MODEL_PATH, S3, WEIGHTS_CHANNEL, WEIGHTS_PATH, check_prefix
from .instances import AMI

_NAME = re.compile(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,62}")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+")
_VARIABLE = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS(?!ES)|PWD|CREDENTIAL", re.IGNORECASE)
#: What a secret looks like wherever it stands: tokens by their beginnings, URLs with a user, a name with its value.
_SECRET_VALUE = re.compile(
    r"\bhf_\w{8}|\bsk-[\w-]{8}|\bgh[a-z]_\w{8}|\bgithub_pat_|\bglpat-|\bxox[a-z]-|\bnvapi-|\b(AKIA|ASIA)[A-Z0-9]{12}"
    r"|\beyJ[\w-]+\.eyJ|-----BEGIN|\b(?i:bearer|basic)\s+\S|://[^/\s]*@"
    r"|(?i:key|token|secret|passw(?:or)?d|passphrase|pwd|credentials?)[\"']?\s*[=:]\s*\S"
    r"|--?[\w-]*(?i:key|token|secret|passw(?:or)?d|passphrase|pwd)[\"',\s]+\S"
)
LONGEST_VALUE = 1024
STARTUP_S = 3600
VARIANT = "default"


@dataclass(frozen=True)
class Deployment:
    """What is to be deployed: model, endpoint configuration and endpoint get one name.

    data           s3://bucket/key.tar.gz, or a prefix that ends with /
    weights        a prefix with the weights, where `data` has none
    count          of instances
    gpus           of one instance; tensors are split over all of them unless `environment` says otherwise
    environment    of the container; SM_VLLM_... become vLLM's arguments
    """

    name: str
    role: str
    image: str
    data: str
    instance_type: str
    gpus: int
    weights: str | None = None
    count: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    isolated: bool = False
    ami: str = AMI

    def __post_init__(self):
        faults = [
            (not _NAME.fullmatch(self.name), f"name={self.name!r}: up to 63 letters, digits and single hyphens"),
            (not _ROLE.fullmatch(self.role), f"role={self.role!r}: give an ARN, arn:aws:iam::123456789012:role/NAME"),
            (not (S3.fullmatch(self.data) and self.data.endswith((".tar.gz", "/"))),
             f"data={self.data!r}: give s3://bucket/key.tar.gz, or a prefix ending in / (bucket: 3 to 63 characters)"),
            (self.count < 1, f"count={self.count}: give at least 1 instance"),
            (not self.image.strip(), "image is empty: give the URI of an image"),
            (bool(self.subnets) != bool(self.security_groups), "a VPC takes both: --subnet and --security-group"),
        ]  # fmt: skip
        if self.weights:
            check_prefix(self.weights)
        for wrong, message in faults:
            if wrong:
                raise ExpertileError(message)
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name) or len(value) > LONGEST_VALUE:
                raise ExpertileError(
                    f"env {name!r}: a name of letters, digits and _, and at most {LONGEST_VALUE} letters"
                )


@dataclass(frozen=True)
class Call:
    """One call: the service's verb and its arguments, and how what it makes is removed."""

    verb: str
    arguments: Mapping[str, Any]
    undo: str
    undo_arguments: Mapping[str, Any]

    def shown(self) -> str:
        """As JSON, with what looks like a secret left out."""
        return f"sagemaker.{self.verb} {json.dumps(_masked(self.arguments), indent=2)}"


def calls(deployment: Deployment) -> list[Call]:
    """create_model, create_endpoint_config, create_endpoint."""
    name = deployment.name
    tags = [{"Key": key, "Value": value} for key, value in deployment.tags.items()]
    tagged = {"Tags": tags} if tags else {}
    model = {
        "ModelName": name,
        "ExecutionRoleArn": deployment.role,
        "PrimaryContainer": _container(deployment),
        **tagged,
    }
    if deployment.subnets:
        groups, subnets = list(deployment.security_groups), list(deployment.subnets)
        model["VpcConfig"] = {"SecurityGroupIds": groups, "Subnets": subnets}
    if deployment.isolated:
        model["EnableNetworkIsolation"] = True
    config = {"EndpointConfigName": name, "ProductionVariants": [_variant(deployment)], **tagged}
    endpoint = {"EndpointName": name, "EndpointConfigName": name, **tagged}
    arguments = {"model": model, "endpoint_config": config, "endpoint": endpoint}
    return [replace(each, arguments=arguments[each.verb.removeprefix("create_")]) for each in removals(name)]


def removals(name: str) -> list[Call]:
    """The calls of any deployment of that name, for what undoes them."""
    kinds = {"model": "ModelName", "endpoint_config": "EndpointConfigName", "endpoint": "EndpointName"}
    return [Call(f"create_{kind}", {}, f"delete_{kind}", {key: name}) for kind, key in kinds.items()]


def environment(deployment: Deployment) -> dict[str, str]:
    """The container's variables: where the model is, over how many GPUs; what is given wins."""
    found = {
        "SM_VLLM_MODEL": WEIGHTS_PATH if deployment.weights else MODEL_PATH,
        "SM_VLLM_TENSOR_PARALLEL_SIZE": str(deployment.gpus),
    }
    return {**found, **deployment.environment}


def _container(deployment: Deployment) -> dict:
    found = {
        "Image": deployment.image,
        "Environment": environment(deployment),
        "ModelDataSource": {"S3DataSource": _source(deployment.data)},
    }
    if deployment.weights:
        source = {"ChannelName": WEIGHTS_CHANNEL, "S3DataSource": _source(deployment.weights)}
        found["AdditionalModelDataSources"] = [source]
    return found


def _source(uri: str) -> dict[str, str]:
    if uri.endswith("/"):
        return {"S3Uri": uri, "S3DataType": "S3Prefix", "CompressionType": "None"}
    return {"S3Uri": uri, "S3DataType": "S3Object", "CompressionType": "Gzip"}


def _variant(deployment: Deployment) -> dict:
    found = {
        "VariantName": VARIANT,
        "ModelName": deployment.name,
        "InstanceType": deployment.instance_type,
        "InitialInstanceCount": deployment.count,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_S,
        "ModelDataDownloadTimeoutInSeconds": STARTUP_S,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    return {**found, **({"InferenceAmiVersion": deployment.ami} if deployment.ami else {})}


def _masked(value: Any, name: str = "", of: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(each, key, of=name) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    named = of == "Environment" and _SECRET.search(name)
    return "***" if isinstance(value, str) and (named or _SECRET_VALUE.search(value)) else value
