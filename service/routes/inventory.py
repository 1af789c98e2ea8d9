"""What there is: the kinds of experiments, and the hosts with their devices.

curl localhost:8000/v1/kinds
curl localhost:8000/v1/devices
curl localhost:8000/v1/hosts/NAME/ceilings
"""

from __future__ import annotations

import inspect
from functools import cache

from fastapi import Request, Response

from service import documents, responses
from service.openapi import shaped
from service.queries import Query
from service.routes import get, plain_router
from service.runtime import of
from torchstone.errors import NotFound
from torchstone.specs import EXAMPLES, KINDS
from torchstone.store import hosts, reports

router = plain_router(prefix="/v1", tags=["inventory"])


@get(router, "/kinds", summary="The kinds of experiments", responses={200: shaped("KindList")})
async def kinds(request: Request) -> Response:
    Query(request)
    return responses.tagged_json(request, _kinds(), {})


@cache
def _kinds() -> bytes:
    items = [
        {
            "kind": kind,
            "summary": inspect.getdoc(spec),
            "example": EXAMPLES[kind],
            "schema": spec.model_json_schema(),
        }
        for kind, spec in KINDS.items()
    ]
    return documents.encode({"items": items, "next_cursor": None})


@get(router, "/devices", summary="Hosts, their devices, and who holds them", responses={200: shaped("HostList")})
async def devices(request: Request) -> Response:
    Query(request)
    runtime = of(request)
    items = await runtime.database.read(hosts.inventory, runtime.settings.lease_s)
    return responses.json(documents.encode({"items": items, "next_cursor": None}))


@get(
    router,
    "/hosts/{name}/ceilings",
    summary="What a host can reach, by its hardware reports",
    responses={200: shaped("HostCeilings")},
)
async def ceilings(name: str, request: Request) -> Response:
    Query(request)
    runtime = of(request)
    found = await runtime.database.read(reports.ceilings, name)
    if found is None:
        known = await runtime.database.read(hosts.find, name)
        why = "has no hardware report that is fit for it" if known else "is not a host that ever registered"
        raise NotFound(f'{name!r} {why}; {{"kind": "hardware"}} makes one on a host that is up')
    return responses.json(documents.encode(found))
