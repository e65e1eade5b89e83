"""Request fields that constrain the answer's form, as OpenAI, vLLM, SGLang and llama.cpp name
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from pydantic import Field

from moe_serve.engine.request.constraint import Constraint, ConstraintKind
from moe_serve.errors import InvalidGrammarError, InvalidRequestError
from moe_serve.http.schema.field_types import ChoiceList, StrictSchema

_Wish = tuple[str, ConstraintKind, Any]  # field name, kind of constraint, value


class JsonSchemaFormat(StrictSchema):
    """A JSON schema. `strict` has no effect: the answer always follows the schema."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictSchema):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = Field(default=None, alias="schema")  # of llama.cpp, with json_object
    structures: Any = None
    triggers: Any = None
    format: Any = None  # the newer form of these two in xgrammar

    def wishes(self) -> Iterator[_Wish]:
        tags = {name: getattr(self, name) for name in ("structures", "triggers", "format")}
        tags = {name: value for name, value in tags.items() if value is not None}
        if self.type == "structural_tag":
            self._check_alone()
            yield "response_format", "structural_tag", tags
        elif tags:
            name = f"response_format.{next(iter(tags))}"
            raise InvalidRequestError(
                f"{name} is only allowed with the type structural_tag.", param=name
            )
        elif self.type == "json_schema":
            param = "response_format.json_schema"
            if self.json_schema is None or self.json_schema.schema_ is None:
                name = param if self.json_schema is None else f"{param}.schema"
                code = "missing_required_parameter"
                raise InvalidRequestError(f"{name} is missing.", param=name, code=code)
            yield f"{param}.schema", "json_schema", self.json_schema.schema_
        elif self.type == "json_object" and self.schema_ is not None:
            yield "response_format.schema", "json_schema", self.schema_
        elif self.type == "json_object":
            yield "response_format", "json_object", ""

    def _check_alone(self) -> None:
        for name in ("json_schema", "schema"):
            if getattr(self, "schema_" if name == "schema" else name) is not None:
                param = f"response_format.{name}"
                raise InvalidRequestError(
                    f"{param} is not allowed with the type structural_tag.", param=param
                )


class StructuredOutputs(StrictSchema):
    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: ChoiceList | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    def wishes(self) -> Iterator[_Wish]:
        name = "structured_outputs"
        yield f"{name}.json", "json_schema", self.json_
        yield f"{name}.regex", "regex", self.regex
        yield f"{name}.choice", "choice", self.choice
        yield f"{name}.grammar", "lark", self.grammar
        yield f"{name}.json_object", "json_object", "" if self.json_object else None
        yield f"{name}.structural_tag", "structural_tag", self.structural_tag


class StructuredFields(StrictSchema):
    """The fields that describe the answer's form, under the name that each server gives them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: ChoiceList | None = None
    guided_grammar: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: Any = None

    def constraint(self) -> tuple[Constraint | None, str | None]:
        """Returns the constraint and the field it came from. Raises InvalidRequestError if there
        are two."""
        return wished_constraint(self._wishes())

    def unknown_parts(self) -> dict[str, Any]:
        """Undeclared fields of the nested objects, by their full names."""
        parts: dict[str, StrictSchema | None] = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
        }
        if self.response_format is not None:
            parts["response_format.json_schema"] = self.response_format.json_schema
        return {
            f"{name}.{key}": value
            for name, part in parts.items()
            if part is not None
            for key, value in (part.model_extra or {}).items()
        }

    def _wishes(self) -> Iterator[_Wish]:
        for part in (self.response_format, self.structured_outputs):
            if part is not None:
                yield from part.wishes()
        yield "guided_json", "json_schema", self.guided_json
        yield "guided_regex", "regex", self.guided_regex
        yield "guided_choice", "choice", self.guided_choice
        yield "guided_grammar", "lark", self.guided_grammar
        yield "json_schema", "json_schema", self.json_schema
        yield "regex", "regex", self.regex
        yield "ebnf", "gbnf", self.ebnf
        yield "grammar", "gbnf", self.grammar
        # "" means that there is no tag
        yield "structural_tag", "structural_tag", self.structural_tag or None


def wished_constraint(wishes: Iterable[_Wish]) -> tuple[Constraint | None, str | None]:
    """Returns the only constraint that is set, and its field. Raises InvalidRequestError if two
    are set.
    """
    found = [wish for wish in wishes if wish[2] is not None]
    if not found:
        return None, None
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0][0]} and {found[1][0]} both describe the form of the answer: send only one.",
            param=found[1][0],
        )
    param, kind, value = found[0]
    try:
        return _constraint(param, kind, value), param
    except InvalidGrammarError as error:
        raise error.of_field(param) from None


def is_response_format(field: str | None) -> bool:
    """Returns True if a constraint that came from this field is a `response_format`."""
    return field is not None and field.partition(".")[0] == "response_format"


def _constraint(param: str, kind: ConstraintKind, value: Any) -> Constraint:
    is_object = isinstance(value, dict if kind == "structural_tag" else dict | bool)
    if kind in ("json_schema", "structural_tag") and is_object:
        try:
            value = msgspec.json.encode(value).decode()
        except RecursionError:
            raise InvalidGrammarError(f"{param} is nested too deeply.") from None
    elif kind == "choice":
        value = msgspec.json.encode(value).decode()
    if not isinstance(value, str):
        raise InvalidRequestError(
            f"{param} must be an object, or a string that contains one.",
            param=param,
            code="invalid_type",
        )
    if kind == "lark" and "::=" in value:
        kind = "gbnf"  # one field for both dialects
    return Constraint(kind, value)
