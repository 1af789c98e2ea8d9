"""What the command line shows to people: tables, a progress line, errors.

    with show.progress(job_id) as on_progress:
        job = client.wait(job_id, on_progress)

A finished job's table is `torchstone.render.text`, the same that the service serves as result.txt. Progress is a bar on
a terminal, and elsewhere a line for every change of state, every new message and every tenth of the way.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchstone.columns import aligned
from torchstone.errors import RequestError, TorchstoneError

Json = dict[str, Any]


def error(problem: TorchstoneError) -> None:
    """An error on stderr, with one line for every fault that the service pointed at and that it does not say itself."""
    print(f"torchstone: {problem}", file=sys.stderr)
    faults = problem.errors if isinstance(problem, RequestError) else []
    for fault in faults:
        line = f"{fault['pointer'] or '(the body)'}: {fault['detail']}"
        if line != str(problem):
            print(f"  {line}", file=sys.stderr)


def as_json(value: Any) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def jobs(found: Sequence[Json]) -> None:
    """One line for every job."""
    rows = [(j["id"], j["kind"], j["state"], j["created_at"][:19].replace("T", " "), j["name"] or "") for j in found]
    _table(("id", "kind", "state", "created (UTC)", "name"), rows)


def devices(hosts: Sequence[Json]) -> None:
    """One line for every device of every host."""
    rows = [
        (
            host["name"],
            host["state"],
            device["name"],
            device.get("description") or "",
            (device.get("held_by") or {}).get("job") or _not_free(host),
        )
        for host in hosts
        for device in host["devices"]
    ]
    _table(("host", "state", "device", "what", "held by"), rows)


def _not_free(host: Json) -> str:
    """Of a device that no job holds, and none may take."""
    return f"free, but for {host['isolated_by']}, which has the machine to itself" if host.get("isolated_by") else ""


def kinds(found: Sequence[Json]) -> None:
    """Every kind with a spec that can be submitted as it stands."""
    for kind in found:
        print(f"{kind['kind']}\n  {json.dumps(kind['example'], ensure_ascii=False)}")


def datasets(found: Sequence[Json]) -> None:
    """Every data set, and whether this host has it."""
    print("\n".join(aligned(["name", "state", "where"], [[row["name"], row["state"], row["where"]] for row in found])))


@contextlib.contextmanager
def progress(job_id: str) -> Iterator[Callable[[Json], None]]:
    """A callback for `Client.wait` that shows how far the job is, on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(job_id)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(job_id[:8], total=None, detail="")

        def on_progress(job: Json) -> None:
            done, total, detail = _progress_of(job)
            bar.update(task, description=job["state"], completed=done, total=total, detail=detail)

        yield on_progress


class _Lines:
    """Progress where there is no terminal: a line when there is news."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._last: tuple[str, str, int] | None = None

    def __call__(self, job: Json) -> None:
        done, total, detail = _progress_of(job)
        message = str((job.get("progress") or {}).get("message") or "") if job["state"] == "running" else ""
        news = (job["state"], message, int(10 * done / total) if total else 0)
        if news != self._last:
            print(" ".join(word for word in (self._job_id, job["state"], detail) if word), file=sys.stderr, flush=True)
        self._last = news


def _progress_of(job: Json) -> tuple[float, float | None, str]:
    waiting = job.get("waiting_for") or {}
    if job["state"] == "queued":
        return 0, None, str(waiting.get("reason") or "")
    now = job.get("progress") or {}
    done, total = now.get("done") or 0, now.get("total")
    if job["state"] != "running" or not now:
        return done, total, ""
    of = f"{done:g}/{total:g} {now.get('unit') or ''}" if total else f"{done:g} {now.get('unit') or ''}" if done else ""
    return done, total, " ".join(word for word in (of.strip(), now.get("message") or "") if word)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
