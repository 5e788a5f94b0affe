"""uvicorn around the app: signals drain, a model that cannot be loaded ends the process."""

from __future__ import annotations

import signal

import uvicorn

from ..errors import ExpertileError
from . import logs
from .app import create_app
from .service import Service
from .settings import Settings


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then answers what is under way, at most settings.drain_seconds long.

    Raises    ExpertileError when the model cannot be loaded
    """
    service = Service(settings)
    app = create_app(service, on_failure=lambda: setattr(server, "should_exit", True))
    logs.configure(settings.json_logs)  # after the imports, some of which set loggers up as they like
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, log_config=None, timeout_graceful_shutdown=settings.drain_seconds,
        server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it is through: a clean end, exit 0
        signal.signal(number, lambda *_: None)
    server.run()
    if isinstance(service.failure, ExpertileError):
        raise service.failure
    if service.failure:
        raise SystemExit(1)
