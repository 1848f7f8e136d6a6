# SPDX-License-Identifier: Apache-2.0
"""/openapi.json: what the API takes, in OpenAPI 3.1, made from the structs that bodies are read into."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flashinfer_backend import __version__

_JSON = "application/json"
_ERROR = {"description": "What was wrong, in OpenAI's form; in Anthropic's on the paths of its API."}


def schema(
    posts: Mapping[str, type[msgspec.Struct]], gets: Sequence[str], deletes: Sequence[str], keys: bool
) -> dict[str, Any]:
    """posts: the kind of body of each path. gets, deletes: paths without a body; parts in braces are
    parameters. keys: whether requests need one."""
    kinds = list(dict.fromkeys(posts.values()))
    bodies, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of_kind = dict(zip(kinds, bodies, strict=True))
    paths: dict[str, Any] = {}
    for path, kind in posts.items():
        content = {_JSON: {"schema": of_kind[kind]}}
        taken = {"requestBody": {"required": True, "content": content}}
        paths[path] = {"post": _operation("post", path) | taken}
    for method, path in [("get", path) for path in gets] + [("delete", path) for path in deletes]:
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        text = {"type": "string"}
        given = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
        paths.setdefault(path, {})[method] = {**_operation(method, path), "parameters": given}
    components: dict[str, Any] = {"schemas": schemas}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "flashinfer-backend", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(method: str, path: str) -> dict[str, Any]:
    name = "_".join(part.strip("{}").replace(".", "_") for part in path.split("/") if part)
    return {
        "operationId": f"{method}_{name or 'page'}",
        "responses": {"200": {"description": "The answer."}, "default": _ERROR},
    }
