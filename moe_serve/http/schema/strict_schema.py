"""The base of every request schema: strict types, sizes first, undeclared fields kept apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from moe_serve.http.schema.field_types import check_num_fields, misfit


class StrictSchema(BaseModel):
    """A schema with strict types: `"1"` and true are not integers.

    Undeclared fields are kept in `model_extra`.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_num_fields(cls, value: Any) -> Any:
        return check_num_fields(value)


Body = TypeVar("Body", bound=BaseModel)


def parse_body(schema: type[Body], content: Mapping[str, Any]) -> Body:
    """Returns the validated request, or raises InvalidRequestError for the first invalid field."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise misfit(error.errors(include_url=False, include_context=False)[0]) from None
