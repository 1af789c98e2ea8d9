"""The head of a job's text: what it is, how it stands, and on what it was measured.

head(job, job["result"])        # ["jit 01938c5e-... (my first run)", "  state     succeeded", ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchstone.pieces import cell, folded
from torchstone.quantities import quantity

Json = Mapping[str, Any]
_MOST_LETTERS = 160
_NOT_MEASURED = {"kind", "name", "labels", "devices", "isolation", "priority", "timeout_s", "start_within_s"}
"""Of a spec, what says how the job is run and not what is measured; or stands in the head already."""


def head(job: Json, result: Json) -> list[str]:
    """The job in one line, and facts about it, each folded below itself."""
    title = f"{job['kind']} {job['id']}" + (f" ({job['name']})" if job.get("name") else "")
    facts = [("state", _state(job))]
    facts += [("spec", line) for line in filter(None, [_spec(job.get("spec") or {})])]
    attempts = job.get("attempts") or []
    hosts = (result.get("environment") or {}).get("hosts") or []
    facts += [("machine", line) for line in filter(None, map(_machine, hosts))]
    if attempts:
        tries = f", attempt {attempts[-1]['number']}" if attempts[-1]["number"] > 1 else ""
        facts.append(("devices", _devices(attempts[-1], hosts) + tries))
    facts += [("software", line) for line in dict.fromkeys(filter(None, map(_software, hosts)))]
    if job.get("finished_at"):
        facts.append(("finished", str(job["finished_at"])[:19].replace("T", " ") + " UTC"))
    return [title, *(line for name, fact in facts for line in folded(fact, f"  {name:<9} "))]


def _devices(attempt: Json, hosts: Sequence[Json]) -> str:
    """What was measured and where: of a host that a job has to itself that can be more than it holds."""
    measured = [str(device["name"]) for host in hosts for device in host.get("devices") or []]
    if set(measured) > set(attempt["devices"]):
        return f"{', '.join(measured)} on {attempt['host']}, which the job had to itself"
    return f"{', '.join(attempt['devices'])} on {attempt['host']}"


def _spec(spec: Json) -> str:
    """What was measured: every setting that is on, a long one cut."""
    facts = []
    for key, value in spec.items():
        if key not in _NOT_MEASURED and value not in (None, False, [], {}):
            told = "true" if value is True else cell(value)
            facts.append(f"{key} {told if len(told) <= _MOST_LETTERS else told[:_MOST_LETTERS] + ' ...'}")
    return ", ".join(facts)


def _state(job: Json) -> str:
    state = str(job["state"])
    fault, progress, waiting = job.get("error"), job.get("progress"), job.get("waiting_for")
    if fault:
        return f"{state}: {fault.get('code')}: {fault.get('message')}"
    if state == "queued" and waiting:
        place = f", position {waiting['position']}" if waiting.get("position") is not None else ""
        return f"{state}{place}: {waiting.get('reason', '')}"
    if state == "running" and progress and progress.get("total"):
        return f"{state}: {progress['done']:g} of {progress['total']:g} {progress.get('unit', '')}".rstrip()
    return state


def _machine(host: Json) -> str:
    cores = host.get("cores")
    used = f"cores {', '.join(map(str, cores))} of {host.get('cpu_count', '?')}" if cores else None
    memory = host.get("memory_bytes")
    words = [host.get("cpu_model"), used, quantity(memory, "B") if memory else None, host.get("system")]
    threads = _found(host, "threads")
    words.append(f"{threads} thread{'' if threads == 1 else 's'}" if threads is not None else None)
    return ", ".join(str(word) for word in words if word)


def _software(host: Json) -> str:
    libraries = host.get("libraries") or {}
    words = [f"{name} {libraries[name]}" for name in ("torch", "numpy", "torchstone") if name in libraries]
    python = [f"Python {host['python']}"] if host.get("python") else []
    return ", ".join(words + python)


def _found(host: Json, key: str) -> Any:
    """A fact of the host itself, or of the first group of facts that has it (torch's are a group of their own)."""
    groups = [host, *(value for value in host.values() if isinstance(value, Mapping))]
    return next((group[key] for group in groups if key in group), None)
