"""The HTTP surface: OpenAI's endpoints, health, metrics, status for the page, the page."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from .. import __version__
from . import errors, sagemaker
from .answers import Answer, prompts_of
from .errors import FAILS, ApiError, shown
from .limits import ApiKey, BodyLimit, Counted, Cut, Head
from .protocol import STREAMS, ChatBody, ChatCompletion, Completion, CompletionBody, Model, ModelList
from .service import Service

PAGE = files("expertile.serve") / "page"
POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
SECRET = ("/v1/", "/status")  # what an API key protects; SageMaker's callers are checked by AWS


def create_app(service: Service, on_failure=lambda: None) -> FastAPI:
    """The application around one service, which starts and ends with it. on_failure is called when loading fails."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        service.start(asyncio.get_running_loop(), on_failure)
        yield
        await asyncio.to_thread(service.stop)

    settings = service.settings
    app = FastAPI(title="expertile", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    errors.install(app)
    _openai(app, service)
    _operations(app, service)
    _page(app, service)
    app.add_middleware(BodyLimit, limit=settings.body_bytes)
    if settings.api_key is not None:
        prefixes = SECRET if settings.sagemaker else (*SECRET, "/invocations")
        app.add_middleware(ApiKey, key=settings.api_key, prefixes=prefixes)
    app.add_middleware(Cut)
    routes = {"/v1/models", "/v1/completions", "/v1/chat/completions", "/invocations", "/ping", "/health", "/metrics"}
    app.add_middleware(Counted, requests=service.metrics.requests, routes=frozenset(routes))
    app.add_middleware(Head)
    sagemaker.install(app, service, lambda body, request: _answer(service, body, request))
    return app


async def _answer(service: Service, body: CompletionBody | ChatBody, request: Request):
    engine, settings = service.require(), service.settings
    if body.model not in (None, settings.name):
        raise _unknown(body.model, settings.name)
    prompts = await prompts_of(body, service.model)
    answer = Answer(body, service.model, settings.name, prompts)
    answer.submit(engine)
    return answer.stream(engine) if body.stream else await answer.whole(engine, request)


def _unknown(name: str, served: str) -> ApiError:
    return ApiError(404, f"model: '{shown(name)}' is not served here, {served!r} is", "model", "model_not_found")


def _openai(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses={200: STREAMS, **FAILS})
    async def completions(body: CompletionBody, request: Request):
        return await _answer(service, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: STREAMS, **FAILS})
    async def chat_completions(body: ChatBody, request: Request):
        return await _answer(service, body, request)

    @app.get("/v1/models", response_model=ModelList, responses=FAILS)
    async def models():
        return ModelList(data=[_model(service)])

    @app.get("/v1/models/{name:path}", response_model=Model, responses=FAILS)
    async def model(name: str):
        if name != service.settings.name:
            raise _unknown(name, service.settings.name)
        return _model(service)


def _model(service: Service) -> Model:
    service.require()
    return Model(id=service.settings.name, created=int(service.started), max_model_len=service.model.context)


def _operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=Response, responses={503: {"description": "not ready, or broken"}})
    async def health():
        return Response(status_code=200 if service.ready else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics():
        service.gauges()
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/status", responses=FAILS)
    async def status() -> dict:
        """What the page shows, as JSON."""
        return _status(service)


def _status(service: Service) -> dict:
    engine, settings, metrics = service.engine, service.settings, service.metrics
    broken = engine.broken if engine else (str(service.failure) if service.failure else "")
    return {
        "model": settings.name,
        "state": "broken" if broken else service.state,
        "why": broken,
        "device": str(service.model.device) if service.model else None,
        "context": service.model.context if service.model else None,
        "quant": settings.quant,
        "guard": (settings.guard if service.guard else "off") if service.state == "ready" else None,
        "version": __version__,
        "slots": settings.max_seqs,
        "running": engine.running if engine else 0,
        "waiting": len(engine.waiting) if engine else 0,
        "compiles": service.guard.compiles if service.guard else 0,
        "generated_tokens": metrics.registry.get_sample_value("expertile_serve_generated_tokens_total"),
        "recent": metrics.recent(),
        "plans": [asdict(each) for each in service.plans],
    }


def _page(app: FastAPI, service: Service) -> None:
    @app.get("/", include_in_schema=False)
    async def index():
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})

    app.mount("/page", StaticFiles(directory=str(PAGE)), name="page")
