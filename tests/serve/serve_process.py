"""Starts `expertile serve` as users do, on a free port, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

TINY = Path(__file__).parents[2] / "models" / "tiny-moe"
COMMAND = "from expertile.cli_serve import main; import sys; main(sys.argv[1:])"


class Server:
    """A server process; `with` ends it. `arguments` as on the command line, behind `expertile serve`."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None, port: int | None = None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        chosen = ["--port", str(self.port)] if port is None else []
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments, *chosen], stdout=self._log, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "EXPERTILE_API_KEY": ""} | (environment or {}),
        )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.client.close()
        self._log.close()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, body, **options) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def wait_ready(self, seconds: float = 60) -> Server:
        seen = self.statuses_until_ready(seconds)
        assert seen[-1] == 200, self.log
        return self

    def statuses_until_ready(self, seconds: float = 60) -> list[int]:
        """What /ping answered, until it was 200."""
        seen: list[int] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None and 200 not in seen:
            with suppress(httpx.TransportError):
                seen.append(self.get("/ping").status_code)
            time.sleep(0.05)
        return seen or [0]

    def terminate(self, seconds: float = 30) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def metric(self, name: str, **labels) -> float:
        """The value of one line of /metrics; 0 when it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def idle(self, seconds: float = 20) -> bool:
        """Waits until no sequence has a slot or waits for one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.get("/status").json()
            if status["running"] == status["waiting"] == 0:
                return True
            time.sleep(0.05)
        return False

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
