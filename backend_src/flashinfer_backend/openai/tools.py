# SPDX-License-Identifier: Apache-2.0
"""Tools of a request: what the template shows of them, and which of them an answer can or must call."""

import secrets
import string
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.errors import ApiError, field_error
from flashinfer_backend.openai.no_effect import NO_EFFECT, OF_FUNCTIONS, check_part
from flashinfer_backend.openai.requests import AllowedChoice, FunctionChoice
from flashinfer_backend.openai.sampling import NO_GUIDE, Guide, schema_guide
from flashinfer_backend.openai.strict import forced_guide

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
MOST_NAME = 128  # characters of a function's name: as Anthropic's API takes; OpenAI's takes 64
# Of a function; return: what it gives back, as transformers describes it.
FIELDS = ("name", "description", "parameters", "strict", "return")
AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call. `choice`: AUTO, NONE, REQUIRED or a function's name.
    `shown`: what the template gets."""

    choice: str = NONE
    shown: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)  # of parameters, by function
    parallel: bool = True
    strict: frozenset[str] = frozenset()  # functions whose calls have to match their schemas

    @property
    def named(self) -> str | None:
        """The one function that has to be called."""
        return self.choice if self.choice not in (AUTO, NONE, REQUIRED) else None

    @property
    def bound(self) -> dict[str, dict[str, Any] | None]:
        """The functions, if calls that the model chooses have to match a schema of theirs: the schemas of the
        strict ones."""
        if self.choice != AUTO or not self.strict & self.schemas.keys():
            return {}
        return {name: schema if name in self.strict else None for name, schema in self.schemas.items()}

    @property
    def guide(self) -> Guide:
        """What forces a call: the arguments of the named function, or a list of calls."""
        if self.named is not None:
            return schema_guide(self.schemas[self.named], "tools")
        if self.choice != REQUIRED:
            return NO_GUIDE
        return forced_guide(self.schemas, self.parallel)


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | FunctionChoice | AllowedChoice | None,
    parallel: bool | None,
    places: Sequence[str] | None = None,
    read: Collection[str] = (),
) -> Tools:
    """`tools` and `tool_choice` of a request. places: of each tool's name in the request (default: as in a
    chat). read: fields of functions that the template reads (ChatTemplate.keys), besides the API's. Raises
    ApiError."""
    if not tools:
        if choice not in (None, NONE, AUTO):
            raise field_error("tool_choice", "is set, but there are no tools")
        return Tools()
    places = places or [f"tools[{n}].function" for n in range(len(tools))]
    functions = [_function(tool, place, read) for tool, place in zip(tools, places, strict=True)]
    names = [function["name"] for function in functions]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise field_error("tools", f"has two of the name {twice[0]}; rename one")
    chosen, taken = AUTO, functions
    named: list[str] = []
    if isinstance(choice, FunctionChoice):
        chosen = choice.function.name
        named = [chosen]
    elif isinstance(choice, AllowedChoice):
        chosen = choice.allowed_tools.mode
        named = [tool.function.name for tool in choice.allowed_tools.tools]
        taken = [function for function in functions if function["name"] in named]
    elif choice is not None:
        chosen = choice
    if unknown := set(named) - set(names):
        raise field_error(
            "tool_choice", f"names {', '.join(sorted(unknown))}; the tools are {', '.join(names)}"
        )
    if chosen == NONE:  # what the model is not told of it does not call
        return Tools()
    return Tools(
        chosen,
        [{"type": "function", "function": function} for function in taken],
        {function["name"]: function.get("parameters") or NO_PARAMETERS for function in taken},
        parallel is not False,
        frozenset(name for name, tool in zip(names, tools, strict=True) if tool["function"].get("strict")),
    )


def _function(tool: Mapping[str, Any], place: str, read: Collection[str]) -> dict[str, Any]:
    function, own = tool.get("function"), place.removesuffix(".function")
    if (kind := tool.get("type")) != "function":
        told = f"{own}.type is {shown(kind)}; only functions are supported"
        raise ApiError(told + ': {"type": "function", "function": {"name": ...}}', param="tools")
    if not isinstance(function, dict):
        told = f"{own}.function is {shown(function)}; it should be an object with a name"
        raise ApiError(told, param="tools")
    if others := sorted(tool.keys() - {"type", "function", *NO_EFFECT}):
        inner = others[0] in FIELDS
        where = f"; it stands in {place}" if inner else ""
        raise ApiError(f"{own} has {shown(others[0])}, which is not a field of a tool{where}", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    allowed = {*string.ascii_letters, *string.digits, *"_-."}
    if not isinstance(name, str) or not name or len(name) > MOST_NAME or set(name) - allowed:
        raise ApiError(
            f"{place}.name is {shown(name)}; it should be 1 to {MOST_NAME} letters, digits, _, - or .",
            param="tools",
        )
    if name in (AUTO, NONE, REQUIRED):
        raise ApiError(f"{place}.name is {shown(name)}, a word of tool_choice; rename it", param="tools")
    # Without any a function takes none; a call's arguments are an object in every format and at every door.
    of_object = isinstance(parameters, dict) and parameters.get("type") == "object"
    if parameters not in (None, {}) and not of_object:
        raise ApiError(f"{place}.parameters should be a JSON schema of the type object", param="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(
            f"{place}.strict is {shown(function['strict'])}; it should be true or false", param="tools"
        )
    if not isinstance(description := function.get("description"), str | None):
        raise ApiError(f"{place}.description is {shown(description)}; it should be a text", param="tools")
    check_part(function, FIELDS, place, "a function", {*read, *OF_FUNCTIONS})
    # How strict a call is read is for the server; the model is not told.
    kept = {*FIELDS, *read} - {"strict", *OF_FUNCTIONS}
    return {key: value for key, value in function.items() if key in kept and value is not None}


def new_call_id(tool_format: str) -> str:
    """Mistral's templates take ids of nine letters or digits only."""
    if tool_format == "mistral":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
