"""SageMaker AI's contract over HTTP, by AWS' model-hosting-container-standards: GET /ping and POST /invocations."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import Discriminator, Tag

from .errors import FAILS
from .protocol import STREAMS, ChatBody, ChatCompletion, Completion, CompletionBody
from .service import Service

SCRIPT = "CUSTOM_SCRIPT_FILENAME"  # of the standards: the Python file of an artefact whose handlers take over
NO_SCRIPT = ".no-script"  # a file name that no artefact has


def _kind(body) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "completion"


Invocation = Annotated[
    Annotated[ChatBody, Tag("chat")] | Annotated[CompletionBody, Tag("completion")], Discriminator(_kind)
]


def install(app: FastAPI, service: Service, answer) -> None:
    """Adds GET /ping and POST /invocations, in whose place the standards' environment variables may put handlers.

    answer   called with body and request, for both kinds of bodies

    A model.py in the artefact is code from elsewhere: it is run only with trust_remote_code.
    """
    if not service.settings.trust_remote_code:
        os.environ.setdefault(SCRIPT, NO_SCRIPT)
    import model_hosting_container_standards.sagemaker as standards

    @app.get("/ping", response_class=Response, responses={503: {"description": "not ready, or broken"}})
    @standards.register_ping_handler
    async def ping() -> Response:
        """200 when the weights are loaded, the kernels warm and the guard sealed; 503 before, and when it broke."""
        return Response(status_code=200 if service.ready else 503)

    @app.post("/invocations", response_model=ChatCompletion | Completion, responses={200: STREAMS, **FAILS})
    @standards.register_invocation_handler
    async def invocations(body: Invocation, request: Request):
        """A body of /v1/chat/completions, which has messages, or of /v1/completions."""
        return await answer(body, request)

    standards.bootstrap(app)
