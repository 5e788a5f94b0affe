"""The commands `expertile sagemaker package|deploy|delete`: a model folder becomes an endpoint on SageMaker AI."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .errors import ExpertileError
from .outputs import check_file

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A model folder as an artefact for AWS' images, and an endpoint on Hopper GPUs from it.",
)

REGION = Annotated[str | None, typer.Option(help="default: AWS_REGION, or that of the profile")]
PROFILE = Annotated[str | None, typer.Option(help="of the AWS configuration")]


@app.command(short_help="An artefact (tar.gz) that brings expertile to the image.")
def package(
    model: Annotated[Path | None, typer.Argument(help="folder of a model; leave it out with --weights")] = None,
    out: Annotated[Path, typer.Option(help="the artefact")] = Path("model.tar.gz"),
    target: Annotated[str, typer.Option("--for", help="vllm: AWS' vLLM image; lmi: LMI/DJL")] = "vllm",
    weights: Annotated[
        str | None, typer.Option(help="where they are instead: s3://bucket/prefix/; for lmi also a name on the hub")
    ] = None,
    wheel: Annotated[
        list[Path] | None,
        typer.Option(help="to install, may be repeated", show_default="expertile's, from the checkout"),
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="lmi: NAME=VALUE of serving.properties")] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="names to leave out: '*.bin'; may be repeated")] = None,
    code: Annotated[bool, typer.Option("--code", help="take .py files too, which the container may run")] = False,
    level: Annotated[int, typer.Option(min=0, max=9, help="of compression; 0 is fastest")] = 1,
):
    """An artefact (tar.gz) that brings expertile to the image: installed at start without a network."""
    from .sagemaker import archive, artefact, checkpoint

    if (model is None) == (weights is None):
        raise ExpertileError("give the folder of a model, or with --weights where its weights are")
    if not out.name.endswith(".tar.gz"):
        raise ExpertileError(f"out={str(out)!r}: SageMaker takes a .tar.gz")
    if model is not None and out.resolve().is_relative_to(model.resolve()):
        raise ExpertileError(f"out={str(out)!r} is inside the model's folder: give a place outside")
    check_file(out)
    packed = checkpoint.members(model, leave_out or (), code) if model is not None else []
    with tempfile.TemporaryDirectory(prefix="expertile-package-") as work:
        wheels = [artefact.check_wheel(each) for each in wheel or (artefact.built_wheel(Path(work)),)]
        packed += artefact.extras(target, wheels, weights, _pairs("option", option))
        with _progress("packing", sum(each.size for each in packed)) as advance:
            digest = archive.write(out, packed, level, advance)
    print(f"{out}: {len(packed)} files, {out.stat().st_size / 1e6:.1f} MB, sha256 {digest}")
    if target == "vllm":
        where = f" --weights {weights}" if weights else ""
        print(f"next: expertile sagemaker deploy {out} --bucket BUCKET --role ARN{where}")


@app.command(short_help="Make model, configuration and endpoint.")
def deploy(
    artefact: Annotated[
        str, typer.Argument(help="s3://bucket/model.tar.gz or a prefix ending in /; or a local .tar.gz")
    ],
    role: Annotated[str, typer.Option(help="ARN of the role that the endpoint has")],
    name: Annotated[str, typer.Option(help="of model, configuration and endpoint")] = "expertile",
    bucket: Annotated[str | None, typer.Option(help="for a local artefact: BUCKET or BUCKET/PREFIX")] = None,
    weights: Annotated[str | None, typer.Option(help="prefix of weights that the artefact has not")] = None,
    instance_type: Annotated[
        str, typer.Option(help="with Hopper GPUs: ml.p5.4xlarge, p5, p5e, p5en")
    ] = "ml.p5.4xlarge",
    instances: Annotated[int, typer.Option(min=1, help="how many")] = 1,
    any_instance: Annotated[bool, typer.Option("--any-instance", help="take an instance without Hopper GPUs")] = False,
    image: Annotated[str | None, typer.Option(help="URI", show_default="AWS' vLLM image")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, e.g. SM_VLLM_MAX_MODEL_LEN=8192")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated")] = None,
    subnet: Annotated[list[str] | None, typer.Option(help="of a VPC; may be repeated")] = None,
    security_group: Annotated[list[str] | None, typer.Option(help="of a VPC; may be repeated")] = None,
    isolated: Annotated[bool, typer.Option("--isolated", help="the container has no network")] = False,
    ami: Annotated[str | None, typer.Option(help="InferenceAmiVersion; empty: AWS' default")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="minutes for the endpoint to come up")] = 60.0,
    wait: Annotated[bool, typer.Option(help="until it is in service")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="remove nothing after a failure")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the calls and make none")] = False,
    region: REGION = None,
    profile: PROFILE = None,
):
    """Model, endpoint configuration and endpoint; removed again when it does not come up."""
    from .sagemaker import deploy as room
    from .sagemaker.calls import Deployment, calls
    from .sagemaker.instances import AMI, gpus, vllm_image

    hoppers, aws = gpus(instance_type, any_instance), room.session(region, profile)
    local, uri = _location(artefact, bucket)
    deployment = Deployment(
        name=name, role=role, image=image or vllm_image(aws.region_name), data=uri, instance_type=instance_type,
        gpus=hoppers, weights=weights, count=instances, environment=_pairs("env", env), tags=_pairs("tag", tag),
        subnets=tuple(subnet or ()), security_groups=tuple(security_group or ()), isolated=isolated,
        ami=AMI if ami is None else ami,
    )  # fmt: skip
    todo = calls(deployment)
    if dry_run:
        if local:
            print(f"s3.upload_file {local} -> {uri}")
        print("\n".join(call.shown() for call in todo))
        return
    if local:
        with _progress(f"copying to {uri}", local.stat().st_size) as advance:
            room.upload(aws, local, *uri.removeprefix("s3://").split("/", 1), advance)
    with _status() as say:
        room.deploy(aws.client("sagemaker"), todo, 60 * timeout, say, wait, keep)
    print(_how_to_use(name, aws.region_name, in_service=wait))


@app.command(short_help="Remove endpoint, configuration and model.")
def delete(
    name: Annotated[str, typer.Argument(help="of model, configuration and endpoint, as deploy gave it to them")],
    region: REGION = None,
    profile: PROFILE = None,
):
    """Endpoint, configuration and model of that name; what is not there is no error."""
    from .sagemaker import deploy as room
    from .sagemaker.calls import removals

    client = room.session(region, profile).client("sagemaker")
    with _status() as say:
        left = room.remove(client, removals(name), say)
    if left:
        raise ExpertileError(f"{', '.join(left)} {name} did not work, see above")
    print(f"{name} is deleted")


def _location(artefact: str, bucket: str | None) -> tuple[Path | None, str]:
    """(the local file or None, where it is or is to be in S3)"""
    if artefact.startswith("s3://"):
        if bucket is not None:
            raise ExpertileError("--bucket is for a local artefact; this one is in S3")
        return None, artefact
    path = Path(artefact)
    if not path.is_file():
        raise ExpertileError(f"artefact={artefact!r} is neither in S3 nor a file here: make it with sagemaker package")
    if bucket is None:
        raise ExpertileError("a local artefact goes to S3 first: give --bucket")
    return path, "s3://" + "/".join([*bucket.removeprefix("s3://").strip("/").split("/"), path.name])


def _pairs(what: str, texts: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ExpertileError(f"{what} {text!r}: give NAME=VALUE")
        found[name] = value
    return found


def _how_to_use(name: str, region: str, in_service: bool) -> str:
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    return "\n".join([
        f"{name} is in service in {region}" if in_service else f"{name} is being created in {region}",
        f"invoke:  aws sagemaker-runtime invoke-endpoint --region {region} --endpoint-name {name} \\",
        "           --content-type application/json --cli-binary-format raw-in-base64-out \\",
        f"           --body '{body}' /dev/stdout",
        f"delete:  expertile sagemaker delete {name} --region {region}",
    ])  # fmt: skip


@contextmanager
def _progress(what: str, total: int):
    """A bar over bytes; what it gives is called with how many came."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _status():
    """A line that says what is under way; every new step stays on the screen."""
    from rich.console import Console

    console, before = Console(highlight=False), [""]
    with console.status("") as status:

        def say(text: str) -> None:
            step = text.rpartition(",")[0] if text.endswith(" min") else text  # the minutes pass in place
            if step != before[0]:
                console.print(step, markup=False)
            before[0] = step
            status.update(text)

        yield say
