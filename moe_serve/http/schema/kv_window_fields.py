"""The field `kv_window` of a request."""

from __future__ import annotations

from moe_serve.engine.request.kv_window import PARAM, KVWindow
from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.field_types import Int, StrictSchema


class KVWindowFields(StrictSchema):
    """The object `kv_window`: which tokens an answer still sees when its context is long."""

    window: Int
    sinks: Int | None = None

    def wish(self) -> KVWindow:
        """Returns the window. Raises InvalidRequestError for an unknown field or a value out of
        range.
        """
        if self.model_extra:
            raise InvalidRequestError(
                "kv_window may only have the fields window and sinks, got "
                f"{min(self.model_extra)[:100]!r}.",
                param=PARAM,
            )
        if self.sinks is None:
            return KVWindow(window=self.window)
        return KVWindow(window=self.window, sinks=self.sinks)
