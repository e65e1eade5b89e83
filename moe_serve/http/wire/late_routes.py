"""Routes whose handlers FastAPI builds when they are first needed.

FastAPI takes about a millisecond for each route: it reads the signature, and makes a validator of
the answer's type. A server has more than forty routes and uses few, so it starts sooner if each
route is built by its first request or by the OpenAPI document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import compile_path

_compiled = functools.cache(compile_path)


class LateRoute(APIRoute):
    """A route that knows which requests are its own, and builds the rest when it is asked."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, methods: Any = None, **settings: Any
    ) -> None:
        self.path, self.endpoint = path, endpoint
        self.methods = {method.upper() for method in methods or ["GET"]}
        self.path_regex, self.path_format, self.param_convertors = _compiled(path)
        self._build = functools.partial(
            super().__init__, path, endpoint, methods=methods, **settings
        )

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there yet: it builds the route, once."""
        build = self.__dict__.pop("_build", None)
        if build is None:
            raise AttributeError(name)
        build()
        return getattr(self, name)


class LateRouter(APIRouter):
    """A router of late routes."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(prefix=prefix, route_class=LateRoute)
