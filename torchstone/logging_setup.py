"""Logging of one process, set up once by whoever starts it: structlog and the standard library in the same lines.

    configure_logging(settings.log_level, "api")
    structlog.get_logger(__name__).info("job accepted", job_id="01938c5e-...")
    # 2026-11-29T20:03:13.123Z [info] job accepted job_id=01938c5e-... part=api

Lines go to stderr: stdout stays free for what a command was asked to print. Context that was bound with
`structlog.contextvars.bind_contextvars(job_id=...)` stands on every line, those of libraries too.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import orjson
import structlog

_QUIET = ("kombu", "amqp", "asyncio", "httpx", "httpcore", "sse_starlette", "alembic")
"""Libraries that say much at info; they are heard from warning on."""


def configure_logging(level: str, part: str, log_format: str = "text") -> None:
    """Send every log line of this process from `level` on to stderr, marked with its `part` (api, worker, ...).

    `log_format`: "text" for people, "json" for one object a line.
    """

    def mark(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("part", part)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        mark,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    rendering: list[structlog.typing.Processor] = [structlog.processors.format_exc_info]
    if log_format == "json":
        rendering.append(structlog.processors.JSONRenderer(serializer=_json))
    else:
        traceback = structlog.dev.plain_traceback
        rendering = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, pad_level=False, exception_formatter=traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # It warns of each doorbell that it puts back when a worker stops listening to a queue, which is as it should be.
    logging.getLogger("kombu.transport.virtual.base").setLevel(logging.ERROR)


def _json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
