"""The calls made, in order; the wait; and after a failure nothing is left of what was made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ExpertileError, MissingExtra
from .calls import Call

FINAL = ("InService", "Failed", "OutOfService", "UpdateRollbackFailed")
POLL_S, DELETE_S = 15.0, 900.0
#: What AWS says of a thing that is not there.
GONE = ("Could not find", "does not exist", "ResourceNotFound", "Cannot find")
LOGS = "/aws/sagemaker/Endpoints/{name}"


class DeployFailed(ExpertileError):
    """The endpoint did not come up; what had been made is removed, or the message says what is left."""


@dataclass(frozen=True)
class Clock:
    """Time as it is; tests have another."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def session(region: str | None = None, profile: str | None = None):
    """A boto3 session with a region. MissingExtra without boto3."""
    try:
        import boto3
        from botocore.exceptions import ProfileNotFound
    except ImportError:
        raise MissingExtra("this needs boto3: pip install 'expertile[sagemaker]'") from None
    try:
        found = boto3.Session(region_name=region, profile_name=profile)
    except ProfileNotFound as error:
        raise ExpertileError(f"{error}") from None
    if not found.region_name:
        raise ExpertileError("no AWS region: give --region, or set AWS_REGION")
    return found


def deploy(
    client,
    todo: Sequence[Call],
    timeout: float,
    say: Callable[[str], None] = lambda text: None,
    wait: bool = True,
    keep: bool = False,
    clock: Clock = Clock(),
) -> None:
    """Makes the calls and waits until the endpoint is in service.

    timeout   seconds for the endpoint to come up
    keep      what was made stays after a failure, to be looked at
    Raises    DeployFailed, with AWS' own reason; KeyboardInterrupt. Both only after the removal
    """
    name, made = todo[-1].arguments["EndpointName"], []
    try:
        for call in todo:
            say(call.verb)
            _call(client, call.verb, call.arguments)
            made.append(call)
        if wait:
            wait_until_in_service(client, name, timeout, say, clock)
    except BaseException as error:
        left = [call.undo for call in made] if keep else remove(client, made, say, clock)
        if not isinstance(error, ExpertileError):
            if left:
                say(f"left behind: {', '.join(left)} {name}")
            raise
        end = f"; left behind, delete with: expertile sagemaker delete {name}" if left else "; nothing is left of it"
        raise DeployFailed(f"{error}{end if made else ''}") from None


def wait_until_in_service(client, name: str, timeout: float, say, clock: Clock) -> None:
    began = clock.now()
    while True:
        about = _call(client, "describe_endpoint", {"EndpointName": name})
        status, passed = about["EndpointStatus"], clock.now() - began
        say(f"{name}: {status}, {passed / 60:.0f} min")
        if status == "InService":
            return
        if status in FINAL:
            reason = about.get("FailureReason") or "AWS gives no reason"
            raise ExpertileError(f"endpoint {name} is {status}: {reason} (its log: {LOGS.format(name=name)})")
        if passed > timeout:
            raise ExpertileError(f"endpoint {name} is {status} after {passed / 60:.0f} min, --timeout is over")
        clock.sleep(POLL_S)


def remove(client, made: Sequence[Call], say=lambda text: None, clock: Clock = Clock()) -> list[str]:
    """Undoes the calls, last first; the undoing calls that did not work. An endpoint that is being created cannot be
    deleted at once: it is tried for DELETE_S.
    """
    left = []
    for call in reversed(made):
        say(call.undo)
        began = clock.now()
        while True:
            try:
                _call(client, call.undo, call.undo_arguments)
                break
            except ExpertileError as error:
                if _is_gone(error):
                    break
                busy = call.undo == "delete_endpoint" and clock.now() - began < DELETE_S
                if not busy:
                    left.append(call.undo)
                    say(f"{call.undo}: {error}")
                    break
                clock.sleep(POLL_S)
    return left


def upload(session, file, bucket: str, key: str, seen: Callable[[int], None]) -> str:
    """The file to S3, in parts; its URI."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        session.client("s3").upload_file(str(file), bucket, key, Callback=seen)
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        raise ExpertileError(f"{file} could not be copied to s3://{bucket}/{key}: {error}") from None
    return f"s3://{bucket}/{key}"


class _Refused(ExpertileError):
    """A call that AWS refused, or that did not reach it."""


def _call(client, verb: str, arguments) -> dict:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return getattr(client, verb)(**arguments)
    except ClientError as error:
        about = error.response.get("Error", {})
        raise _Refused(f"{verb}: {about.get('Code', 'refused')}: {about.get('Message', error)}") from None
    except BotoCoreError as error:  # no answer: the call may have had its effect
        unknown = "; whether AWS did it is not known" if verb.startswith("create") else ""
        raise _Refused(f"{verb}: {error}{unknown}") from None


def _is_gone(error: ExpertileError) -> bool:
    return any(text in str(error) for text in GONE)
