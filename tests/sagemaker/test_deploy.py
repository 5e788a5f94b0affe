"""The calls of a deployment, made against moto: what AWS is told, and that a failure leaves nothing behind."""

import json

import boto3
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError

from expertile.errors import ExpertileError
from expertile.sagemaker import deploy as room
from expertile.sagemaker.calls import Deployment, calls, environment
from expertile.sagemaker.deploy import Clock, DeployFailed

ROLE = "arn:aws:iam::123456789012:role/endpoint"
FIXED = ("--role", ROLE, "--region", "us-east-1")


def deployment(**changes):
    given = dict(
        name="moe", role=ROLE, image="image:1", data="s3://bucket/m.tar.gz", instance_type="ml.p5.4xlarge", gpus=1
    )
    return Deployment(**{**given, **changes})


@pytest.fixture
def client(aws):
    return boto3.client("sagemaker")


def left(client):
    listed = (client.list_models()["Models"], client.list_endpoint_configs()["EndpointConfigs"])
    return [len(each) for each in (*listed, client.list_endpoints()["Endpoints"])]


class Watched:
    """A client whose calls are noted, and replaced by name."""

    def __init__(self, client, **instead):
        self.client, self.instead, self.seen = client, instead, []

    def __getattr__(self, verb):
        def call(**arguments):
            self.seen.append(verb)
            return self.instead.get(verb, getattr(self.client, verb))(**arguments)

        return call


def refuses(code, message="no"):
    def call(**_):
        raise ClientError({"Error": {"Code": code, "Message": message}}, "call")

    return call


def clock():
    """Time that passes by sleeping alone."""
    now = [0.0]
    return Clock(now=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))


def test_an_endpoint_is_what_was_asked_for(client, run):
    output = run(
        "deploy", "s3://bucket/m.tar.gz", *FIXED, "--name", "moe", "--instance-type", "ml.p5en.48xlarge",
        "--instances", "2", "--env", "SM_VLLM_MAX_MODEL_LEN=8192", "--tag", "team=a", "--subnet", "subnet-1",
        "--security-group", "sg-1", "--isolated",
    )  # fmt: skip
    model = client.describe_model(ModelName="moe")
    container = model["PrimaryContainer"]
    assert container["Image"] == "763104351884.dkr.ecr.us-east-1.amazonaws.com/vllm:server-sagemaker-cuda-v2.2"
    assert container["Environment"] == {
        "SM_VLLM_MODEL": "/opt/ml/model", "SM_VLLM_TENSOR_PARALLEL_SIZE": "8", "SM_VLLM_MAX_MODEL_LEN": "8192",
    }  # fmt: skip
    source = {"S3Uri": "s3://bucket/m.tar.gz", "S3DataType": "S3Object", "CompressionType": "Gzip"}
    assert container["ModelDataSource"]["S3DataSource"] == source
    assert model["ExecutionRoleArn"] == ROLE and model["VpcConfig"] == {
        "SecurityGroupIds": ["sg-1"],
        "Subnets": ["subnet-1"],
    }
    (variant,) = client.describe_endpoint_config(EndpointConfigName="moe")["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.p5en.48xlarge", 2)
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] == 3600
    endpoint = client.describe_endpoint(EndpointName="moe")
    assert endpoint["EndpointStatus"] == "InService"
    assert client.list_tags(ResourceArn=endpoint["EndpointArn"])["Tags"] == [{"Key": "team", "Value": "a"}]
    assert "invoke-endpoint" in output and "expertile sagemaker delete moe" in output


def test_the_arguments_are_those_of_awss_own_model(aws):
    """botocore checks every name and type against the service's description, without a call."""
    from botocore.validate import ParamValidator

    model = boto3.client("sagemaker").meta.service_model
    everything = deployment(
        weights="s3://bucket/w/",
        data="s3://bucket/a/",
        tags={"a": "b"},
        subnets=("s",),
        security_groups=("g",),
        isolated=True,
    )
    for call in calls(everything):
        operation = model.operation_model("".join(part.title() for part in call.verb.split("_")))
        report = ParamValidator().validate(call.arguments, operation.input_shape)
        assert not report.has_errors(), report.generate_report()


def test_every_ami_and_instance_is_one_that_aws_knows(aws):
    from expertile.sagemaker.instances import AMI, HOPPER

    shape = boto3.client("sagemaker").meta.service_model.operation_model("CreateEndpointConfig").input_shape
    members = shape.members["ProductionVariants"].member.members
    assert AMI in members["InferenceAmiVersion"].enum
    assert set(HOPPER) == {each for each in members["InstanceType"].enum if each.startswith("ml.p5")}


def test_weights_elsewhere_become_a_further_source():
    container = calls(deployment(weights="s3://bucket/qwen/"))[0].arguments["PrimaryContainer"]
    (source,) = container["AdditionalModelDataSources"]
    assert source["S3DataSource"] == {"S3Uri": "s3://bucket/qwen/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert container["Environment"]["SM_VLLM_MODEL"] == f"/opt/ml/additional-model-data-sources/{source['ChannelName']}"


def test_what_is_given_wins_over_what_follows():
    found = environment(deployment(gpus=8, environment={"SM_VLLM_TENSOR_PARALLEL_SIZE": "4", "SM_VLLM_MODEL": "/x"}))
    assert found == {"SM_VLLM_MODEL": "/x", "SM_VLLM_TENSOR_PARALLEL_SIZE": "4"}


def test_a_dry_run_prints_the_calls_without_secrets_and_makes_none(client, run, tmp_path):
    (tmp_path / "m.tar.gz").write_bytes(b"x")
    output = run(
        "deploy", tmp_path / "m.tar.gz", "--bucket", "bucket/models", *FIXED, "--dry-run", "--env", "HF_TOKEN=hidden"
    )
    assert f"s3.upload_file {tmp_path / 'm.tar.gz'} -> s3://bucket/models/m.tar.gz" in output
    verbs = [line.split()[0] for line in output.splitlines() if line.startswith("sagemaker.")]
    assert verbs == ["sagemaker.create_model", "sagemaker.create_endpoint_config", "sagemaker.create_endpoint"]
    shown = json.loads(output.split("sagemaker.create_model ")[1].split("sagemaker.")[0])
    assert shown["PrimaryContainer"]["Environment"]["HF_TOKEN"] == "***" and "hidden" not in output
    assert left(client) == [0, 0, 0]


def test_a_secret_is_known_by_its_name():
    names = ("MYPASS", "DB_PWD", "Passphrase", "X_PASSWD", "PASSWORD", "PASSES")
    shown = calls(deployment(environment=dict.fromkeys(names, "hunter3")))[0].shown()
    found = json.loads(shown.split(" ", 1)[1])["PrimaryContainer"]["Environment"]
    assert [name for name in names if found[name] != "***"] == ["PASSES"]


@pytest.mark.parametrize(
    "value",
    [
        "hf_aBcDeFgHiJkLmNoPqRsT",
        "Bearer abc",
        "Authorization: bearer abc",
        "Basic dXNlcjpw",
        "AKIAIOSFODNN7EXAMPLE",
        "id is ASIAIOSFODNN7EXAMPLE",
        "https://user:pass@host/path",
        "postgres://:pass@host",
        "sk-proj-0123456789",
        "ghp_0123456789abcdef",
        "eyJhbGciOi.eyJzdWIi.x",
        "-----BEGIN PRIVATE KEY-----",
        '{"api_key": "abc"}',
        "password=abc;x=1",
        "uid=sa;pwd=abc",
        '["--api-key", "abc"]',
        "--api-key abc",
        "aws_secret_access_key = abc",
        "https://glittering@host/x",
    ],
)
def test_a_secret_is_known_by_its_value_too(value):
    shown = calls(deployment(environment={"SM_VLLM_X": value}, tags={"x": value}))[0].shown()
    found = json.loads(shown.split(" ", 1)[1])
    assert found["PrimaryContainer"]["Environment"]["SM_VLLM_X"] == found["Tags"][0]["Value"] == "***"


@pytest.mark.parametrize(
    "value",
    [
        "8192",
        "s3://bucket/m/",
        "https://host:8080/a@b",
        "arn:aws:iam::123456789012:role/x",
        "auto",
        "the basics",
        '{"max_new_tokens": 5}',
    ],
)
def test_what_is_no_secret_is_shown(value):
    shown = calls(deployment(environment={"SM_VLLM_X": value}))[0].shown()
    assert json.loads(shown.split(" ", 1)[1])["PrimaryContainer"]["Environment"]["SM_VLLM_X"] == value


def test_a_local_artefact_is_copied_first(client, run, tmp_path):
    boto3.client("s3").create_bucket(Bucket="bucket")
    (tmp_path / "m.tar.gz").write_bytes(b"x" * 1000)
    run("deploy", tmp_path / "m.tar.gz", "--bucket", "bucket", *FIXED)
    assert boto3.client("s3").get_object(Bucket="bucket", Key="m.tar.gz")["Body"].read() == b"x" * 1000
    assert left(client) == [1, 1, 1]


def test_a_bucket_that_is_not_there_is_one_sentence_and_nothing_is_created(client, run, tmp_path):
    (tmp_path / "m.tar.gz").write_bytes(b"x")
    with pytest.raises(ExpertileError, match=r"could not be copied to s3://nobucket/m\.tar\.gz"):
        run("deploy", tmp_path / "m.tar.gz", "--bucket", "nobucket", *FIXED)
    assert left(client) == [0, 0, 0]


@pytest.mark.parametrize("instance_type", ["ml.g5.12xlarge", "ml.p4d.24xlarge", "ml.p6-b200.48xlarge", "p5.48xlarge"])
def test_an_instance_without_hoppers_is_refused_unless_asked_for(client, run, instance_type):
    options = ("deploy", "s3://bucket/m.tar.gz", *FIXED, "--instance-type", instance_type)
    with pytest.raises(ExpertileError, match="has no Hopper GPU"):
        run(*options)
    assert left(client) == [0, 0, 0]
    assert instance_type in run(*options, "--any-instance", "--dry-run")


@pytest.mark.parametrize("verb, made", [("create_model", 0), ("create_endpoint_config", 1), ("create_endpoint", 2)])
def test_when_a_call_is_refused_what_was_made_before_is_removed(client, verb, made):
    watched = Watched(client, **{verb: refuses("AccessDenied", "not allowed")})
    with pytest.raises(DeployFailed, match=f"{verb}: AccessDenied: not allowed") as caught:
        room.deploy(watched, calls(deployment()), 60, clock=clock())
    assert left(client) == [0, 0, 0]
    assert sum(each.startswith("delete") for each in watched.seen) == made
    assert ("nothing is left of it" in str(caught.value)) == bool(made)


def test_without_an_answer_it_is_said_that_the_call_may_have_worked(client):
    def lost(**_):
        raise ReadTimeoutError(endpoint_url="https://aws")

    with pytest.raises(DeployFailed, match=r"create_endpoint: Read timeout.*whether AWS did it is not known"):
        room.deploy(Watched(client, create_endpoint=lost), calls(deployment()), 60, clock=clock())
    assert left(client) == [0, 0, 0]


def test_what_somebody_else_made_under_that_name_is_not_touched(client):
    client.create_model(ModelName="moe", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "theirs"})
    with pytest.raises(DeployFailed, match="create_model"):
        room.deploy(Watched(client, create_model=refuses("ValidationException", "exists")), calls(deployment()), 60)
    assert client.describe_model(ModelName="moe")["PrimaryContainer"]["Image"] == "theirs"


def test_an_endpoint_that_fails_is_removed_and_awss_reason_is_told(client):
    failed = lambda **_: {"EndpointStatus": "Failed", "FailureReason": "CannotStartContainerError"}
    with pytest.raises(DeployFailed, match=r"is Failed: CannotStartContainerError.*Endpoints/moe.*nothing is left"):
        room.deploy(Watched(client, describe_endpoint=failed), calls(deployment()), 60, clock=clock())
    assert left(client) == [0, 0, 0]


def test_waiting_ends_with_the_time_and_says_what_is_under_way(client):
    said = []
    creating = lambda **_: {"EndpointStatus": "Creating"}
    with pytest.raises(DeployFailed, match="is Creating after 10 min, --timeout is over"):
        room.deploy(Watched(client, describe_endpoint=creating), calls(deployment()), 600, said.append, clock=clock())
    assert left(client) == [0, 0, 0] and "moe: Creating, 5 min" in said


def test_an_endpoint_that_cannot_be_deleted_yet_is_tried_again(client):
    times = iter(range(100))

    def busy(**arguments):
        if next(times) < 3:
            refuses("ValidationException", "Cannot delete in-progress endpoint")()
        return client.delete_endpoint(**arguments)

    watched = Watched(client, describe_endpoint=lambda **_: {"EndpointStatus": "Failed"}, delete_endpoint=busy)
    with pytest.raises(DeployFailed, match="nothing is left of it"):
        room.deploy(watched, calls(deployment()), 60, clock=clock())
    assert left(client) == [0, 0, 0] and watched.seen.count("delete_endpoint") == 4


def test_what_cannot_be_removed_is_named(client):
    watched = Watched(
        client, describe_endpoint=lambda **_: {"EndpointStatus": "Failed"}, delete_model=refuses("AccessDenied")
    )
    with pytest.raises(DeployFailed, match="left behind, delete with: expertile sagemaker delete moe"):
        room.deploy(watched, calls(deployment()), 60, clock=clock())
    assert left(client) == [1, 0, 0]


def test_an_interruption_removes_what_was_made(client):
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        room.deploy(Watched(client, describe_endpoint=interrupted), calls(deployment()), 60, clock=clock())
    assert left(client) == [0, 0, 0]


def test_with_keep_a_failure_leaves_everything(client):
    failed = lambda **_: {"EndpointStatus": "Failed"}
    with pytest.raises(DeployFailed, match="delete with: expertile sagemaker delete moe"):
        room.deploy(Watched(client, describe_endpoint=failed), calls(deployment()), 60, keep=True, clock=clock())
    assert left(client) == [1, 1, 1]


def test_delete_removes_all_three_and_twice_is_no_error(client, run):
    run("deploy", "s3://bucket/m.tar.gz", *FIXED, "--name", "moe")
    assert left(client) == [1, 1, 1]
    for _ in range(2):
        assert "moe is deleted" in run("delete", "moe", "--region", "us-east-1")
        assert left(client) == [0, 0, 0]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(name="a--b"), "letters, digits and single hyphens"),
        (dict(name="x" * 64), "up to 63"),
        (dict(role="me"), "give an ARN"),
        (dict(data="bucket/m.tar.gz"), "s3://bucket/key.tar.gz"),
        (dict(data="s3://bucket/m.zip"), "a prefix ending in /"),
        (dict(weights="s3://bucket/w"), "s3://bucket/prefix/"),
        (dict(subnets=("s",)), "a VPC takes both"),
        (dict(image=" "), "image is empty"),
        (dict(count=0), "at least 1"),
        (dict(environment={"A B": "x"}), "env 'A B'"),
        (dict(environment={"A": "x" * 1025}), "at most 1024"),
    ],
)
def test_what_aws_would_refuse_is_refused_here(changes, message):
    with pytest.raises(ExpertileError, match=message):
        deployment(**changes)


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_where_aws_has_its_images_elsewhere_one_must_be_named(aws, run, region):
    with pytest.raises(ExpertileError, match="name the image with --image"):
        run("deploy", "s3://bucket/m.tar.gz", "--role", ROLE, "--region", region, "--dry-run")


def test_without_a_region_it_is_asked_for(run, monkeypatch, tmp_path):
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ExpertileError, match="give --region"):
        run("deploy", "s3://bucket/m.tar.gz", "--role", ROLE, "--dry-run")


def test_invoking_goes_through_the_runtime(client, run):
    run("deploy", "s3://bucket/m.tar.gz", *FIXED, "--name", "moe")
    answer = boto3.client("sagemaker-runtime").invoke_endpoint(EndpointName="moe", Body=b"{}")
    assert answer["Body"].read() == b"body"  # what moto says; the endpoint of that name is known to it
