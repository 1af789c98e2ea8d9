"""Whatever is sent, the answer is never a 5xx, and always JSON that says what was wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.conftest import SPEC, Service
from torchstone.specs import JitSpec

pytestmark = pytest.mark.slow
EXAMPLES = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
FIELDS = sorted(JitSpec.model_fields)
LAYER_WORDS = st.sampled_from(["type", "in_features", "out_features", "kernel_size", "Linear", "Conv2d", "ReLU", "p"])
layers = st.lists(st.dictionaries(LAYER_WORDS, anything | LAYER_WORDS, max_size=4), max_size=4)
models = st.fixed_dictionaries(
    {}, optional={"preset": anything, "layers": layers | anything, "input_shape": anything, "init": anything}
)
specs = st.dictionaries(st.sampled_from(FIELDS), anything | models, max_size=4).map(lambda fields: {**SPEC, **fields})


def check(service: Service, body: bytes, **options: Any) -> None:
    answer = service.http.post("/v1/jobs", content=body, **options)
    assert answer.status_code < 500, (body, answer.text)
    document = answer.json()
    if answer.status_code >= 400:
        assert document["status"] == answer.status_code and document["detail"]


@EXAMPLES
@given(body=st.binary(max_size=200))
def test_any_bytes(service: Service, body: bytes) -> None:
    check(service, body)


@EXAMPLES
@given(value=anything)
def test_any_json(service: Service, value: Any) -> None:
    check(service, json.dumps(value).encode())


@EXAMPLES
@given(spec=specs)
def test_almost_specs(service: Service, spec: Any) -> None:
    check(service, json.dumps(spec).encode())


@EXAMPLES
@given(
    query=st.text(max_size=60),
    prefer=st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=30).map(str.strip),
)
def test_any_query_and_header(service: Service, query: str, prefer: str) -> None:
    for path in ("/v1/jobs", "/v1/jobs/01938c5e-7b2c-7d11-8a3f-2f6f0a7d5c11", "/v1/devices"):
        headers = {"If-None-Match": prefer, "Range": prefer, "Idempotency-Key": prefer, "Last-Event-ID": prefer}
        answer = service.http.get(path, params={"limit": query, "cursor": query}, headers=headers)
        assert answer.status_code < 500
    assert service.http.get("/v1/jobs", params={query: query}).status_code < 500
