# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests: what OpenAI's API has and this one takes, and further parameters of the engine.

A field that is not here is refused by its name. Fields of OpenAI's API that ask for what this server does not
do are here, so that the value that asks for nothing passes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as info

from flashinfer_backend.core.bounds import (
    MOST_CHOICES,
    MOST_LOOSE,
    MOST_PAGE_ITEMS,
    MOST_TOP_LOGPROBS,
    MOST_WORD,
)
from flashinfer_backend.core.values import INT32_MAX, MOST_SHOWN, shown
from flashinfer_backend.openai.bounds import bounded, check_field, check_items
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.no_effect import check_no_effect

# What a response may include.
ENCRYPTED_REASONING = "reasoning.encrypted_content"
OUTPUT_LOG_PROBS = "message.output_text.logprobs"
# Of calls of tools that OpenAI runs, which no answer here has. Clients ask for them with these tools.
OF_LEFT_OUT_TOOLS = (
    *("web_search_call.action.sources", "web_search_call.results", "file_search_call.results"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
)

LEAST_TIMEOUT_S = 1e-6
MOST = 3e38  # of numbers that the engine keeps in 32 bits: beyond them they were infinite
LEAST = 1e-38  # and zero

Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Tokens = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, Meta(ge=0.0, le=MOST)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=INT32_MAX)]
# The answer's id, and a header of it. Its pattern is the only one here: errors have these words instead.
RequestId = Annotated[str, Meta(pattern=r"^[!-~]{1,180}$(?!\n)")]
REQUEST_ID = "1 to 180 printable ASCII characters without blanks"
TopLogProbs = Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)]
Factor = Annotated[float, Meta(ge=LEAST, le=MOST)]
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  # older names, vLLM's
ChoiceWord = Literal["auto", "none", "required"]
AllowedMode = Literal["auto", "required"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer must be; one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class EngineRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all requests to the engine have. priority: of the engine's queue, in which the smallest
    number comes first. queue_timeout: how many seconds it may wait there. user: see openai/no_effect.py."""

    model: str = ""
    user: str | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] = 0
    queue_timeout: Annotated[float, Meta(ge=LEAST_TIMEOUT_S, le=INT32_MAX)] | None = None


class Sampling(EngineRequest, kw_only=True):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    seed: int | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Factor | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    # GUIDED, for the same.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    speculative_decoding: bool | None = True
    # Of the table in openai/no_effect.py.
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None

    def __post_init__(self) -> None:
        check_no_effect(self)
        _check_words("stop", self.stops)
        _check_words("bad_words", self.bad_words or [])
        if self.allowed_token_ids == []:
            raise field_error("allowed_token_ids", "is empty; it should hold at least one id, or be left out")
        if self.truncate_prompt_tokens == 0:
            raise field_error(
                "truncate_prompt_tokens", "is 0; it should be 1 or more, or -1 for as many as the model takes"
            )
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise wrong_value("seed", self.seed, "an integer of 64 bits")
        self._read_guided()
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise field_error("stream_options", "needs stream true")
        if options.include_obfuscation:
            raise ApiError(
                "stream_options.include_obfuscation is not supported: nothing hides how long tokens are",
                param="stream_options",
            )
        if options.continuous_usage_stats and not options.include_usage:
            raise ApiError(
                "stream_options.continuous_usage_stats needs include_usage true", param="stream_options"
            )

    def _read_guided(self) -> None:
        """Makes structured_outputs of its older names."""
        given = {name: value for name in GUIDED if (value := getattr(self, name)) is not None}
        if not given:
            if self.structured_outputs == StructuredOutputs():
                kinds = ", ".join(StructuredOutputs.__struct_fields__)
                raise field_error("structured_outputs", f"is empty; it should have one of {kinds}")
            return
        names = [*given]
        if len(given) > 1 or self.structured_outputs is not None:
            names += [] if self.structured_outputs is None else ["structured_outputs"]
            raise ApiError(f"{' and '.join(names)} say what the answer is; give one of them", param=names[0])
        (name,) = names
        self.structured_outputs = StructuredOutputs(**{name.removeprefix("guided_"): given[name]})

    @property
    def guide_field(self) -> str:
        """Where the request has what became structured_outputs."""
        return next((name for name in GUIDED if getattr(self, name) is not None), "structured_outputs")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """json_schema: with name, schema and strict next to it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class FunctionChoice(msgspec.Struct, forbid_unknown_fields=True, tag="function"):
    """A function that has to be called, or can be."""

    function: FunctionName

    @classmethod
    def of(cls, name: str) -> "FunctionChoice":
        return cls(FunctionName(name))


class AllowedFunctions(msgspec.Struct, forbid_unknown_fields=True):
    mode: AllowedMode
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)]


class AllowedChoice(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    allowed_tools: AllowedFunctions


# Of log probabilities of prompts, which are told with whole answers alone.
NOT_STREAMED = "cannot be streamed; set stream to false"


class ChatRequest(Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    n: Choices | None = 1
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: TopLogProbs | None = None
    prompt_logprobs: TopLogProbs | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ChoiceWord | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # true, but where the final message goes on
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    request_id: RequestId | None = None
    # Of the table in openai/no_effect.py.
    verbosity: str | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    # Refused unless null.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modalities not in (None, ["text"]):
            raise wrong_value("modalities", self.modalities, '["text"]: only text is supported')
        if self.store:
            raise field_error("store", "should be false: this server keeps nothing")
        _check_end(self)
        for name, instead in {
            "audio": "only text is supported",
            "functions": "use tools",
            "function_call": "use tool_choice",
            "prediction": "it is not supported",
            "web_search_options": "it is not supported",
            "chat_template": "the checkpoint's own is used; see chat_template_kwargs",
        }.items():
            if getattr(self, name) is not None:
                raise field_error(name, f"should be left out: {instead}")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs true")
        _check_prompt_logprobs(self)


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]
    n: Choices | None = 1
    best_of: Choices | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16
    logprobs: TopLogProbs | None = None
    prompt_logprobs: TopLogProbs | None = None
    echo: bool | None = False
    request_id: RequestId | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suffix:
            raise field_error("suffix", "is not supported; put all of the text into prompt")
        if self.max_tokens == 0 and self.min_tokens:
            raise field_error("min_tokens", f"is {self.min_tokens}, but max_tokens is 0")
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise field_error("best_of", f"is {self.best_of}; it should be at least n, {n}")
        if self.stream and self.best_of is not None and self.best_of > n:
            raise field_error(
                "best_of", "greater than n cannot be streamed: the best are known at the end only"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise field_error("echo", f"with logprobs {NOT_STREAMED}")
        _check_prompt_logprobs(self)


class ToolName(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, tag="function"):
    """A tool of a response that has to be called, or can be."""

    name: str
    namespace: str | None = None


class CustomToolName(ToolName, tag="custom"):
    pass


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools"):
    mode: AllowedMode
    tools: Annotated[list[ToolName | CustomToolName], Meta(min_length=1)]


class ResponsesRequest(Sampling, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    top_logprobs: TopLogProbs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ChoiceWord | ToolName | CustomToolName | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Of the table in openai/no_effect.py. client_metadata: of Codex, which session and turn it is.
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: Tokens | None = None
    truncation: str | None = None
    # Refused unless they ask for nothing.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream_options is not None and self.stream_options.include_usage:
            raise ApiError(
                "stream_options.include_usage is for chats and completions; here the last event has it",
                param="stream_options",
            )
        for name in ("background", "conversation", "prompt", "return_token_ids"):
            if getattr(self, name):
                raise field_error(name, "is not supported")
        for what in self.include or []:
            if what not in (ENCRYPTED_REASONING, OUTPUT_LOG_PROBS, *OF_LEFT_OUT_TOOLS):
                known = f"{ENCRYPTED_REASONING} and {OUTPUT_LOG_PROBS}"
                raise field_error("include", f"holds {shown(what)}; {known} are supported")
        if self.top_logprobs and not self.log_probs:
            raise field_error("top_logprobs", f"needs {OUTPUT_LOG_PROBS} in include")

    @property
    def log_probs(self) -> bool:
        return OUTPUT_LOG_PROBS in (self.include or [])


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What a request for a kept response may say: it is whole, and comes as it was."""

    stream: Literal["false"] = "false"


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which of the items that a kept response was made of. after: the id of the one before them."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_PAGE_ITEMS)] = 20
    order: Literal["asc", "desc"] = "desc"


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Anthropic's, of reasoning. adaptive: as the template has it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """name: with type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ClearThinking(msgspec.Struct, forbid_unknown_fields=True):
    """Claude Code asks that all thinking is kept, which is what happens anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[ClearThinking] = []


class Diagnostics(msgspec.Struct, forbid_unknown_fields=True):
    previous_message_id: None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's: what says how many tokens a prompt has."""

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Of the table in openai/no_effect.py.
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    # Refused unless they ask for nothing.
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None

    def __post_init__(self) -> None:
        check_no_effect(self)
        if self.mcp_servers:
            raise field_error(
                "mcp_servers", "is not supported: this server runs no tools; have the client run them"
            )


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Anthropic's."""

    max_tokens: Tokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    # Of the table in openai/no_effect.py.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # Refused unless they ask for nothing.
    container: None = None
    diagnostics: Diagnostics | None = None
    inference_geo: None = None
    thread: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_words("stop_sequences", self.stop_sequences or [])
        if self.thread is not None:  # by the code the package's tools know to send all messages instead
            raise field_error(
                "thread",
                "is not supported: this server keeps no messages; send all of them",
                code="thread_unsupported_request",
            )


class EmbeddingRequest(EngineRequest, kw_only=True):
    """prompt_name: which of the checkpoint's prompts is put before each text."""

    input: str | list[Any]
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    add_special_tokens: bool = True
    prompt_name: str | None = None


class RerankRequest(EngineRequest, kw_only=True):
    """Cohere's and Jina's, as vLLM takes it. top_n: 0 or null for all documents."""

    query: str
    documents: list[Any]
    top_n: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    return_documents: bool = True
    instruction: str | None = None


class ScoreRequest(EngineRequest, kw_only=True):
    """vLLM's, by its newer names and its older ones."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    instruction: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a prompt or messages."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None  # true, but where the final message goes on
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False

    def __post_init__(self) -> None:
        _check_end(self)
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name):
                    raise field_error(name, "needs messages")


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str = ""


Body = TypeVar("Body", bound=msgspec.Struct)
EMPTY = (b"null", b"false", b'""', b"[]", b"{}")  # values of fields that may be unknown
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`(?: - at `\$\.?(.*)`)?")
_WRONG = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_MISSING = re.compile(r"Object missing required field `(.+?)`(?: - at `\$\.?(.*)`)?")


def decode(kind: type[Body], body: bytes) -> Body:
    """A request's body, within its bounds. Raises ApiError that names the field which is wrong."""
    with _worded(kind, body):
        try:
            decoded = msgspec.json.decode(bounded(kind, body), type=kind)
        except msgspec.ValidationError:
            if len(body) > MOST_LOOSE:
                raise
            decoded = msgspec.json.decode(bounded(kind, _without_empty(kind, body)), type=kind)
    check_items(decoded)
    return decoded


def _without_empty(kind: type[msgspec.Struct], body: bytes) -> bytes:
    """A body without what is written by clients that send every field they know: fields that are unknown here
    and null, false or empty, and those that are null where only their absence says so."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}

    def says_nothing(name: str, raw: bytes) -> bool:
        if (field := fields.get(name)) is None:
            return raw in EMPTY
        return raw == b"null" and not field.required and not _takes_null(field.type)

    kept = {name: raw for name, value in given.items() if not says_nothing(name, raw := bytes(value))}
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in kept.items()) + b"}"


@cache
def _takes_null(of: Any) -> bool:
    found = info.type_info(of)
    while isinstance(found, info.Metadata):
        found = found.type
    if isinstance(found, info.UnionType):
        return found.includes_none
    return isinstance(found, info.NoneType | info.AnyType | info.RawType)


def convert(kind: type[Body], query: Mapping[str, str]) -> Body:
    """A request's query. Raises ApiError that names the parameter which is wrong."""
    with _worded(kind):
        return msgspec.convert(dict(query), kind, strict=False)


@contextmanager
def _worded(kind: type[msgspec.Struct], body: bytes = b"") -> Iterator[None]:
    """Has msgspec's errors as ApiError. body: what is decoded, if it is JSON."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _error(kind, str(error)) from None
    except msgspec.DecodeError as error:
        half = "; it has half of a surrogate pair, which is no character" if _HALF.search(body) else ""
        raise ApiError(f"the body is not valid JSON: {error}{half}") from None
    except UnicodeDecodeError as of_text:
        at = of_text.start
        try:
            body.decode()
        except UnicodeDecodeError as of_body:  # where other errors of JSON count
            at = of_body.start
        raise ApiError(f"the body is not valid JSON: no UTF-8 at byte {at}") from None
    except RecursionError:
        raise ApiError("the body's JSON is nested too deeply") from None


def _error(kind: type[msgspec.Struct], text: str) -> ApiError:
    if found := _UNKNOWN.match(text):
        place = _place(found)
        place = place if len(place) <= MOST_SHOWN else place[:MOST_SHOWN] + "..."
        return ApiError(f"Unrecognized request argument supplied: {place}", param=place)
    if found := _MISSING.match(text):
        place = _place(found)
        return field_error(place, "is missing", code="missing_required_parameter")
    if found := _WRONG.fullmatch(text):
        if "matching regex" in found[1]:
            return field_error(found[2], f"should be {REQUEST_ID}")
        known = _words(kind, found[2]) if found[1].startswith(("Invalid enum", "Invalid value")) else ""
        return ApiError(f"{found[2]}: {found[1]}{known and '; it should be '}{known}", param=found[2])
    return ApiError(text)


def _words(kind: type[msgspec.Struct], place: str) -> str:
    """The words that a field of a request, or of an object in it, can have, and the types of objects."""
    types: list[info.Type] = [info.type_info(kind)]
    structs: list[info.StructType] = []
    *path, last = re.findall("[a-z_]+", place)
    for name in (*path, last):
        structs = [each for each in types if isinstance(each, info.StructType)]
        fields = [field for each in structs for field in each.fields if field.encode_name == name]
        types = [each for field in fields for each in _types(field.type)]
    words = [str(word) for each in types if isinstance(each, info.LiteralType) for word in each.values]
    words += [str(each.tag) for each in structs if each.tag_field == last]
    objects = [str(each.tag) for each in types if isinstance(each, info.StructType) and each.tag]
    words += [f"an object of the type {' or '.join(objects)}"] * bool(objects)
    return " or ".join(words)


def _types(of: info.Type) -> list[info.Type]:
    """Those that a union or a list is of; else the type itself."""
    inner = getattr(of, "types", None) or [getattr(of, "item_type", None) or getattr(of, "type", of)]
    return [of] if inner == [of] else [each for one in inner for each in _types(one)]


def _place(found: re.Match[str]) -> str:
    """A field's place: the path of the object that holds it, and its name."""
    return f"{found[2]}.{found[1]}" if found[2] else found[1]


def _check_words(name: str, words: Sequence[str]) -> None:
    longest = max((len(word.encode(errors="replace")) for word in words), default=0)
    check_field(name, longest, MOST_WORD, "bytes in a word")
    if not all(words):
        raise field_error(name, "holds an empty text; leave it out")


def _check_prompt_logprobs(request: ChatRequest | CompletionRequest) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise field_error("prompt_logprobs", NOT_STREAMED)


def _check_end(request: ChatRequest | TokenizeRequest) -> None:
    if request.add_generation_prompt and request.continue_final_message:
        raise field_error("add_generation_prompt", "should be false or left out with continue_final_message")
