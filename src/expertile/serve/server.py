"""uvicorn around the app: signals drain, a port or a model that cannot be had ends the process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket

import uvicorn

from ..errors import ExpertileError
from . import logs
from .app import create_app
from .service import Service
from .settings import Settings

log = logging.getLogger("expertile.serve")
GRACE = 3  # seconds after the drain in which a step ends and everybody is told; before 30, when containers are killed
BACKLOG = 2048  # connections that the system holds for us, as uvicorn has it
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a name may have an address in a family that this machine has not


def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then answers what is under way, at most settings.drain_seconds long.

    Raises    ExpertileError when the address cannot be had or the model cannot be loaded
    """
    sockets = _listening(settings.host, settings.port)
    service = Service(settings)
    app = create_app(service, on_failure=lambda: setattr(server, "should_exit", True))
    logs.configure(settings.json_logs)  # after the imports, some of which set loggers up as they like
    config = uvicorn.Config(
        app, log_config=None, timeout_graceful_shutdown=settings.drain_seconds + GRACE, server_header=False
    )
    server = _Server(config, service)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again when it is through: a clean end, exit 0
        signal.signal(number, lambda *_: None)
    log.info("listening on %s", _url(settings.host, sockets[0].getsockname()[1]))
    server.run(sockets)
    if isinstance(service.failure, ExpertileError):
        raise service.failure
    if service.failure:
        raise SystemExit(1)
    if service.state in (
        "loading",
        "warming",
    ):  # in a thread amid others' code, which the interpreter's end would abort
        logging.shutdown()
        os._exit(0)


class _Server(uvicorn.Server):
    """Has the engine end what is left after the drain: who is cut off hears so, where uvicorn would only hang up."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets=None) -> None:
        end = asyncio.get_running_loop().call_later(self._service.settings.drain_seconds, self._service.cut)
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # a second Ctrl-C, after which uvicorn leaves the app as it is
                self._service.cut()
                await self.lifespan.shutdown()
        finally:
            end.cancel()


def _listening(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of host, all on one port. ExpertileError when there is none to be had."""
    found, missed = [], None
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in infos:
            try:
                found.append(socket.create_server((address[0], port, *address[2:]), family=family, backlog=BACKLOG))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                missed = error
            else:
                port = port or found[0].getsockname()[1]
        if not found:
            raise missed
    except (OSError, ValueError) as error:  # ValueError: a host that can be no name
        for each in found:
            each.close()
        raise ExpertileError(f"cannot listen on {_url(host, port)}: {_why(error)}; see --host and --port") from error
    return found


def _why(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0
    text = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
