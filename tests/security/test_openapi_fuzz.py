"""Requests drawn from our own openapi.json, good and bad: no 5xx, and answers as documented.

`scripts/fuzz_api` runs the same with 200 examples for each operation.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.sampled_cases import EVERY_CASE
from tests.support.security.real_server import RealServer

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8" if EVERY_CASE else "3"))
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.mark.timeout(60 + 40 * NUM_EXAMPLES)
def test_the_document_is_true(server: RealServer) -> None:
    """Every operation runs before any failure is reported."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    failures: dict[str, str] = {}
    num_operations = 0
    for found in document.get_all_operations():
        operation = found.ok()
        num_operations += 1
        try:
            _try_operation(operation, server)
        except Exception as error:  # whatever it is, the others are tried too
            failures[operation.label] = str(error)[:2000]
    assert not failures, "\n\n".join(f"{name}: {why}" for name, why in failures.items())
    assert num_operations >= 8


def _try_operation(operation: Any, server: RealServer) -> None:
    strategy = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def try_one(case: Any) -> None:
        response = case.call(base_url=server.url, timeout=60)
        case.validate_response(response, checks=CHECKS)

    try_one()


def test_every_reference_can_be_followed(shared_server: RealServer) -> None:
    document = shared_server.client.get("/openapi.json").json()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                found = document
                for part in reference.removeprefix("#/").split("/"):
                    found = found[part]
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(document)
    assert "422" not in str(document["paths"].values())
