"""What lives as long as the service's process: the store, the writer, the poller, the bell, the reconciler.

    async with running(settings) as runtime:
        await runtime.database.read(...)

Routes reach it through `of(request)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
from fastapi import Request

from service.collector import Collector
from service.database import Database
from service.fleet import Fleet
from service.metrics import Metrics
from service.reconciler import reconcile_forever
from service.waits import Waits
from service.writer import Writer
from torchstone.queue import Bell
from torchstone.settings import Settings
from torchstone.store import Store
from torchstone.store.artifacts import Blobs

log = structlog.get_logger(__name__)


@dataclass
class Runtime:
    """One process's own parts."""

    settings: Settings
    database: Database
    blobs: Blobs
    writer: Writer
    waits: Waits
    fleet: Fleet
    bell: Bell
    collector: Collector
    metrics: Metrics
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    stopping: bool = False

    def release(self) -> None:
        """Answer everybody who waits with what is known now: the process is about to stop. Any thread, or a signal."""
        self.stopping = True
        self.loop.call_soon_threadsafe(self.waits.release)


def of(request: Request) -> Runtime:
    """The parts behind a request."""
    runtime: Runtime = request.app.state.runtime
    return runtime


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Runtime]:
    """Everything started; stopped again at the end."""
    store = Store(settings.database_url)
    database = Database(store)
    writer, waits, bell = Writer(store), Waits(database), Bell(settings)
    blobs = Blobs(settings.artifacts_url)
    collector = Collector(store, blobs, settings)
    runtime = Runtime(
        settings,
        database,
        blobs,
        writer,
        waits,
        Fleet(database, settings.lease_s),
        bell,
        collector,
        Metrics(database, settings),
    )
    for name, work in {
        "writer": writer.run(),
        "waits": waits.run(),
        "reconciler": reconcile_forever(database, bell, settings),
    }.items():
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_tell)
        runtime.tasks.append(task)
    collector.start()
    try:
        yield runtime
    finally:
        waits.release()
        for task in runtime.tasks:
            task.cancel()
        await asyncio.gather(*runtime.tasks, return_exceptions=True)
        await asyncio.to_thread(writer.close)
        await asyncio.to_thread(bell.close)
        await asyncio.to_thread(collector.close)
        waits.close()
        store.dispose()


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a part of the service ended", task=task.get_name(), exc_info=error)
