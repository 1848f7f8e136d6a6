# SPDX-License-Identifier: Apache-2.0
"""What a request says about sampling, as the engine takes it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from flashinfer_backend.core.bounds import WORD_IDS
from flashinfer_backend.core.checkpoint_json import check_kinds, read_object_if_there
from flashinfer_backend.core.sampling_params import CHOICE_GUIDE, GREEDY_TEMPERATURE, SamplingParams
from flashinfer_backend.core.values import MOST_SHOWN, shown
from flashinfer_backend.openai.bounds import check_field
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.requests import (
    Factor,
    ResponseFormat,
    Sampling,
    Share,
    StructuredOutputs,
    Temperature,
    TopK,
    TopP,
)
from flashinfer_backend.text.tokenizer import TextTokenizer

ANY_OBJECT = {"type": "object", "additionalProperties": True}
OF_SCHEMAS = "name", "description", "schema", "strict"  # next to the type json_schema


class Guide(NamedTuple):
    """What an answer has to follow: a grammar as SamplingParams has it, and the request's field that asks for
    it."""

    kind: str
    text: str
    field: str = ""


NO_GUIDE = Guide("", "")


class Defaults(msgspec.Struct):
    """Where a request is silent: what the checkpoint's generation_config.json recommends, else OpenAI's.

    stop_strings end a chat's answer, next to the stop words that its request names.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: Factor = 1.0
    stop_strings: list[Annotated[str, msgspec.Meta(min_length=1)]] = []

    @classmethod
    def load(cls, folder: Path) -> Defaults:
        """Raises ValueError for a generation_config.json that is not one."""
        file = folder / "generation_config.json"
        found = read_object_if_there(file)
        numbers = [name for name in cls.__struct_fields__ if name != "stop_strings"]
        check_kinds(found, dict.fromkeys(numbers, "number"), f"{file}: ")
        known = {name: found[name] for name in cls.__struct_fields__ if found.get(name) is not None}
        if isinstance(known.get("stop_strings"), str):  # as transformers takes it
            known["stop_strings"] = [known["stop_strings"]]
        try:
            return msgspec.convert(known, cls)
        except ValueError as error:
            raise ValueError(f"{file} cannot be used: {error}") from None


@dataclass(frozen=True)
class EngineLimits:
    vocab_size: int
    max_seq_len: int
    max_input_len: int
    guided_decoding: bool = True


class Length(NamedTuple):
    """Tokens of the prompt, the most of the answer (None: all that there is room for), and the request's
    fields for both."""

    prompt: int
    answer: int | None = None
    prompt_field: str = "prompt"
    answer_field: str = "max_tokens"

    def room(self, limits: EngineLimits) -> int:
        """The most tokens of the answer. Raises ApiError where prompt or answer are too long."""
        # Clients know the error by "prompt is too long" and "This model's maximum context length is".
        if self.prompt > limits.max_input_len:
            raise ApiError(
                f"the prompt is too long: it has {self.prompt} tokens and may have {limits.max_input_len}."
                f" This model's maximum context length is {limits.max_seq_len} tokens",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        room = limits.max_seq_len - self.prompt
        if self.answer is not None and self.answer > room:
            raise ApiError(
                f"This model's maximum context length is {limits.max_seq_len} tokens. The prompt has"
                f" {self.prompt} tokens and {self.answer} were requested; at most {room} are left",
                param=self.answer_field,
                code="context_length_exceeded",
            )
        return room if self.answer is None else self.answer


class NamedTokens(NamedTuple):
    """Tokens that a request names."""

    bias_ids: list[int]
    bias_values: list[float]
    stop_ids: list[int]
    bad_words: list[list[int]]
    allowed_ids: list[int]


def named_tokens(request: Sampling, limits: EngineLimits, tokenizer: TextTokenizer) -> NamedTokens:
    """Those of logit_bias, stop_token_ids, bad_words and allowed_token_ids. Raises ApiError for others."""
    given = request.logit_bias or {}
    for value in given.values():
        if not -100.0 <= value <= 100.0:
            raise field_error("logit_bias", f"holds {shown(value)}; it should lie in -100..100")
    bias_ids = check_ids("logit_bias", given, limits)
    stop_ids = check_ids("stop_token_ids", request.stop_token_ids or (), limits)
    allowed_ids = sorted(set(check_ids("allowed_token_ids", request.allowed_token_ids or (), limits)))
    if len(allowed_ids) == limits.vocab_size:
        allowed_ids = []
    bad_words = _bad_words(request, limits, tokenizer)
    return NamedTokens(bias_ids, list(given.values()), stop_ids, bad_words, allowed_ids)


def _bad_words(request: Sampling, limits: EngineLimits, tokenizer: TextTokenizer) -> list[list[int]]:
    """The ids of each bad word at a text's beginning and behind a blank. Raises ApiError for too many."""
    words = [form for word in request.bad_words or [] for form in (word, " " + word.lstrip())]
    if not words:
        return []
    found = dict.fromkeys(tuple(ids) for ids in tokenizer.encode_batch(words, False))
    # An id beyond the checkpoint's vocabulary never comes.
    kept = [list(ids) for ids in found if ids and max(ids) < limits.vocab_size]
    check_field("bad_words", sum(map(len, kept)), WORD_IDS.values, "ids")
    return kept


def sampling_params(
    request: Sampling,
    defaults: Defaults,
    limits: EngineLimits,
    tokens: NamedTokens,
    end_id: int | None,
    length: Length,
    guide: Guide = NO_GUIDE,
) -> SamplingParams:
    """tokens: what named_tokens returned. Raises ApiError for what does not fit."""
    if guide != NO_GUIDE and not limits.guided_decoding:
        raise field_error(
            guide.field,
            "needs guided decoding, which is switched off on this server (guided_decoding_backend none)",
        )
    temperature = _given(request.temperature, defaults.temperature)
    top_k = _given(request.top_k, defaults.top_k)
    room = length.room(limits)
    if request.min_tokens > room:
        raise field_error("min_tokens", f"is {request.min_tokens}, but the answer has at most {room} tokens")
    seed = request.seed
    return SamplingParams(
        max_tokens=room,
        min_tokens=request.min_tokens,
        end_id=-1 if request.ignore_eos or end_id is None else end_id,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_k=max(top_k, 0),  # -1 is another word for none
        top_p=_given(request.top_p, defaults.top_p),
        min_p=_given(request.min_p, defaults.min_p),
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        late_ids=tokens.stop_ids if request.min_tokens else [],
        stop_sequences=[[i] for i in tokens.stop_ids],
        bad_words=tokens.bad_words,
        allowed_ids=tokens.allowed_ids,
        bias_ids=tokens.bias_ids,
        bias_values=tokens.bias_values,
        grammar_type=guide.kind,
        grammar=guide.text,
        perf_metrics=True,
        speculative_decoding=request.speculative_decoding is not False,
    )


def shortened(prompt: list[int], request: Sampling, limits: EngineLimits) -> list[int]:
    """The end of a prompt, as truncate_prompt_tokens asks for it."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    return prompt[-(limits.max_input_len if most == -1 else most) :]


def check_ids(place: str, ids: Iterable[int | str], limits: EngineLimits) -> list[int]:
    """The ids that a field of the request holds. Raises ApiError for one outside of the vocabulary."""
    found = []
    for given in ids:
        try:
            token = int(given)
        except ValueError:
            token = -1
        if not 0 <= token < limits.vocab_size:
            told = shown(given) if len(str(given)) > MOST_SHOWN else given
            raise field_error(place, f"holds {told}; token ids should lie in 0..{limits.vocab_size - 1}")
        if str(token) != str(given):  # two keys of an object could be one id
            raise field_error(place, f"holds {shown(given)}; it should be {shown(str(token))}")
        found.append(token)
    return found


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def guide_of(
    response_format: ResponseFormat | None, request: Sampling, format_field: str = "response_format"
) -> Guide:
    """What an answer has to follow. format_field: where the request has the format. Raises ApiError for a
    wrong guide, and for more than one."""
    guides = []
    kind = "text" if response_format is None else response_format.type
    given = (response_format and response_format.json_schema) or {}
    for name, value in given.items():
        if value is not None and not (kind == "json_schema" and name in OF_SCHEMAS):
            raise field_error(format_field, f"of type {kind} should have no {shown(name)}")
    if kind == "json_object":
        guides.append(schema_guide(ANY_OBJECT, format_field))
    elif kind == "json_schema":
        schema, strict = given.get("schema"), given.get("strict")
        if not isinstance(given.get("name", ""), str):
            raise wrong_value(f"{format_field}.json_schema.name", given["name"], "a text")
        if not isinstance(strict, bool | None):
            raise wrong_value(f"{format_field}.json_schema.strict", strict, "true, false or null")
        if not isinstance(schema, dict):
            raise field_error(
                format_field, "of type json_schema should hold a name and, under schema, a JSON schema"
            )
        guides.append(schema_guide(schema, format_field))
    if request.structured_outputs is not None:
        guides += _structured_guides(request.structured_outputs, request.guide_field)
    if len(guides) > 1:
        fields = " and ".join(dict.fromkeys(guide.field for guide in guides))
        raise ApiError(
            f"{fields}: there are {len(guides)} guides of the answer, and there should be one",
            param=guides[-1].field,
        )
    return guides[0] if guides else NO_GUIDE


def schema_guide(schema: Mapping[str, Any], field: str) -> Guide:
    return Guide("json_schema", msgspec.json.encode(schema).decode(), field)


def _structured_guides(structured: StructuredOutputs, field: str) -> list[Guide]:
    guides: list[Guide] = []
    if isinstance(structured.json, str):
        guides.append(Guide("json_schema", structured.json, field))
    elif structured.json is not None:
        guides.append(schema_guide(structured.json, field))
    if structured.json_object:
        guides.append(schema_guide(ANY_OBJECT, field))
    if structured.regex is not None:
        guides.append(Guide("regex", structured.regex, field))
    if structured.grammar is not None:
        guides.append(Guide("ebnf_grammar", structured.grammar, field))
    if structured.choice is not None:
        if not structured.choice or not all(structured.choice):
            place = "guided_choice" if field == "guided_choice" else f"{field}.choice"
            raise ApiError(f"{place} should hold at least one text, and no empty one", param=field)
        guides.append(Guide(CHOICE_GUIDE, msgspec.json.encode(structured.choice).decode(), field))
    return guides
