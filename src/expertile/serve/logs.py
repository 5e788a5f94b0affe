"""Logs of the server: plain lines for people, JSON lines for a container. Neither has prompts, answers or keys."""

from __future__ import annotations

import json
import logging
import sys
import time

OURS = ("expertile", "uvicorn", "uvicorn.access", "uvicorn.error")
THEIRS = ("transformers", "model_hosting_container_standards")  # they bring handlers of their own


class JsonLines(logging.Formatter):
    """One object a record: time, level, logger, message; for an access record method, path and status as well."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.name == "uvicorn.access" and len(record.args or ()) == 5:
            _, line["method"], line["path"], _, line["status"] = record.args
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class WithoutQuery(logging.Filter):
    """Access lines say the path alone: a query may hold what is nobody's business."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, version, status = record.args
            record.args = client, method, path.partition("?")[0], version, status
        return True


def configure(json_lines: bool, level: int = logging.INFO) -> None:
    """All loggers of the process to stderr. Others' below a warning are left out."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_lines else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in (*OURS, *THEIRS):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        if name in OURS:
            logger.setLevel(level)
    logging.getLogger("uvicorn.access").filters[:] = [WithoutQuery()]
