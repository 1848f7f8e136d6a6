# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import Raw
from starlette.responses import Response

from flashinfer_backend.core.output import say_once
from flashinfer_backend.core.values import shown
from flashinfer_backend.openai.answer import (
    Choices,
    finish_reason,
    note_sent,
    respond,
    take_text,
    text_of_ids,
)
from flashinfer_backend.openai.errors import ApiError, field_error, wrong_value
from flashinfer_backend.openai.formats import choice as formats
from flashinfer_backend.openai.formats import harmony
from flashinfer_backend.openai.formats.calls import ListReader, NamedReader
from flashinfer_backend.openai.formats.events import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    Event,
    Reader,
    merged,
)
from flashinfer_backend.openai.formats.json_scan import ValueScanner
from flashinfer_backend.openai.formats.reasoning import is_opened
from flashinfer_backend.openai.link import Stream, Streams
from flashinfer_backend.openai.log_probs import (
    PromptLogProbs,
    chat_log_probs,
    check_log_probs,
    in_thread_if_many,
    prompt_log_probs,
)
from flashinfer_backend.openai.requests import ChatRequest, Sampling
from flashinfer_backend.openai.sampling import (
    NO_GUIDE,
    Guide,
    Length,
    NamedTokens,
    guide_of,
    named_tokens,
    shortened,
)
from flashinfer_backend.openai.served_model import Answering, ServedModel, generation_request
from flashinfer_backend.openai.strict import CALLS_OR_JSON, calls_guide
from flashinfer_backend.openai.template import plain_messages
from flashinfer_backend.openai.tools import AUTO, Tools, new_call_id, read_tools
from flashinfer_backend.serving.generation import Chunk
from flashinfer_backend.transport import protocol


@dataclass(frozen=True)
class Conversation:
    """What a model is asked, however the request said it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    guide: Guide = NO_GUIDE
    guide_is_for_content: bool = False  # it is a response_format: calls need not follow it
    variables: Mapping[str, Any] | None = None  # of the template
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    field: str = "messages"  # of the request, which holds them


class Turn:
    """One answer to a conversation, submitted: its sequences, and how their text is read."""

    def __init__(self, served: ServedModel, conversation: Conversation, streaming: bool) -> None:
        self.served, self.conversation = served, conversation
        self.tools = conversation.tools
        # The answer ends with its first call, so its text is followed as it comes, streamed or not.
        self.one_call = self.tools.choice == AUTO and not self.tools.parallel
        self.streaming = streaming or self.one_call
        self.guide = conversation.guide
        if self.tools.guide != NO_GUIDE:  # such an answer has no content
            if self.guide != NO_GUIDE and not conversation.guide_is_for_content:
                raise ApiError(
                    f"tool_choice forces a call, so {self.guide.field} cannot be followed; drop one",
                    param=self.guide.field,
                )
            self.guide = self.tools.guide
        # Forced calls are plain JSON, whatever the model's own format.
        self.tool_format = served.tool_format if self.tools.choice == AUTO else "none"
        self.reasoning_format = served.reasoning_format if self.guide == NO_GUIDE else "none"
        # An answer that follows a guide of the request's own follows no other, but for the format of content:
        # such an answer may call functions instead.
        self.calls_or_json = (
            self.guide != NO_GUIDE
            and conversation.guide_is_for_content
            and self.tools.choice == AUTO
            and self.tool_format in CALLS_OR_JSON
        )
        self.bound = self.tools.bound if self.guide == NO_GUIDE else {}
        if self.calls_or_json:
            self.bound = self.tools.bound or dict.fromkeys(self.tools.schemas)
        elif self.guide != NO_GUIDE and conversation.guide_is_for_content:
            self.tool_format = "none"  # all of it is content, also what looks like Harmony's marks
        self.text = ""  # of the prompt
        self.prompt: list[int] = []
        self.tokens: NamedTokens
        self.inside = False  # the prompt opens the reasoning
        self.streams: Streams
        self.skip_special_tokens = True

    def prepare(self, request: Sampling) -> None:
        """Renders the prompt, and makes what takes time by the request's size. Raises ApiError."""
        conversation, served = self.conversation, self.served
        limits = served.limits
        text = render(served, conversation)
        # Open answers are many, and a message can have a body's size in keys that no template shows.
        self.conversation = replace(conversation, messages=(), documents=None, variables=None)
        if self.guide != NO_GUIDE and served.reasoning_format == "harmony":
            text = harmony.opened(text)
        self.text = text
        if self.tools.choice == AUTO and served.tool_format == "none":
            known = ", ".join(name for name in formats.TOOL_FORMATS if name != "none")
            raise ApiError(
                "the checkpoint's chat template shows no known format of tool calls; start the server with"
                f" --tool-format ({known}), or force calls by tool_choice",
                param="tools",
            )
        self.inside = self.reasoning_format == "think" and _opens_reasoning(text, served, conversation)
        if self.bound:
            if not limits.guided_decoding and not self.calls_or_json:
                raise ApiError(
                    "strict functions need guided decoding, which is switched off on this server"
                    " (guided_decoding_backend none); leave strict out",
                    param="tools",
                )
            content = self.guide.text if self.calls_or_json else None
            self.guide = calls_guide(
                self.bound, self.tool_format, self.reasoning_format, self.inside, content
            )
        marks = formats.WITH_SPECIAL_TOKENS
        special = self.tool_format in marks or self.reasoning_format in marks
        self.skip_special_tokens = request.skip_special_tokens and not special
        self.tokens = named_tokens(request, limits, served.tokenizer)

    async def encode(self) -> None:
        """Makes ids of what was prepared. Raises ApiError."""
        self.served.check_room()
        field = self.conversation.field
        (self.prompt,) = await self.served.encode(
            [self.text], self.conversation.add_special_tokens, field=field
        )
        if not self.prompt:
            raise ApiError(f"the chat template makes an empty prompt of {field}", param=field)

    async def submit(
        self,
        request: Sampling,
        n: int,
        max_tokens: int | None,
        max_tokens_field: str = "max_tokens",
        log_probs: bool = False,
        top: int = 0,
        prompt_top: int | None = None,
    ) -> None:
        """Hands what was prepared to the engine. n: answers. prompt_top: prompt_logprobs. Raises ApiError."""
        served = self.served
        if not self.prompt:
            await self.encode()
        self.prompt = shortened(self.prompt, request, served.limits)
        length = Length(len(self.prompt), max_tokens, self.conversation.field, max_tokens_field)
        # ignore_eos asks for all of its tokens.
        stops = [] if request.ignore_eos else served.defaults.stop_strings
        row = generation_request(
            served, request, self.prompt, self.tokens, length, self.streaming, self.guide, stops
        )
        row.params.log_probs, row.params.top_logprobs = log_probs, top
        row.params.prompt_log_probs = prompt_top
        told = 0 if prompt_top is None else 1 + prompt_top
        asks = "prompt_logprobs" if told and not log_probs else "top_logprobs"
        fields = (asks, max_tokens_field, *("n" for _ in range(n > 1)))
        check_log_probs([(row, n)], told, request.stream, not told, *fields)
        self.streams = await served.generate([(row, n)], self.skip_special_tokens)

    def reader(self) -> Reader:
        if self.tools.named is not None:
            return NamedReader(self.tools.named)
        if self.tools.guide != NO_GUIDE:
            return ListReader()
        return formats.make_reader(
            self.tool_format, self.reasoning_format, self.tools.schemas, self.inside, self.bound,
            self.calls_or_json,
        )  # fmt: skip


def _opens_reasoning(prompt: str, served: ServedModel, conversation: Conversation) -> bool:
    """As is_opened says, of the last message that is not the assistant's."""
    asked = next((m for m in reversed(conversation.messages) if m["role"] != "assistant"), None)

    def with_other(text: str) -> str:
        messages = [{**m, "content": text} if m is asked else m for m in conversation.messages]
        try:
            return render(served, replace(conversation, messages=messages))
        except ApiError:  # the template takes no such text
            return ""

    return is_opened(prompt, asked["content"].strip() if asked else "", with_other)


def render(served: ServedModel, conversation: Conversation) -> str:
    """The text of the prompt, by the checkpoint's template. Raises ApiError."""
    if served.template is None:
        raise ApiError(
            f"the model {served.name} has no chat template (chat_template.jinja, or chat_template"
            " in tokenizer_config.json); send its prompt to /v1/completions",
            param=conversation.field,
        )
    return served.template.render(
        conversation.messages,
        tools=conversation.tools.shown or None,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt and not conversation.continue_final_message,
        continue_final_message=conversation.continue_final_message,
        variables=conversation.variables,
        field=conversation.field,
    )


async def token_log_probs(served: ServedModel, chunk: Chunk, top: int) -> list[Raw]:
    """Log probabilities of a chunk's tokens, each with `top` alternatives."""
    write = partial(chat_log_probs, chunk, served.chat_tokens, top)
    return await in_thread_if_many(write, len(chunk.ids), top)


class Answer:
    """One sequence of a turn: its chunks become events."""

    def __init__(self, turn: Turn, stream: Stream, top: int | None = None) -> None:
        """top: how many alternatives of each token events of content have, and its log probability; None: not
        even that."""
        self._turn, self._stream, self._top = turn, stream, top
        self._unsaid: list[tuple[int, tuple[Raw, ...]]] = []  # of tokens behind the last event
        self._reader = turn.reader()
        self._decoder = turn.served.decoder(turn.skip_special_tokens)
        self.calls = 0
        self.calls_sent = 0  # of a stream
        self.finish: str | None = None  # why it ended
        self.stopped_in_call = False  # it stopped before the last call's arguments were whole
        self._cut = False  # it ended with the first call
        self._arguments: ValueScanner | None = None  # of the latest call
        self._reasoning: list[str] = []

    async def log_probs(self, chunk: Chunk) -> list[Raw]:
        """Those of a chunk's tokens, if they are wanted with the events of content."""
        return [] if self._top is None else await token_log_probs(self._turn.served, chunk, self._top)

    def take(self, chunk: Chunk, probs: Sequence[Raw] = ()) -> list[Event]:
        """What a chunk says; sets `finish` with the last one. Ids behind the end of the answer are taken off
        the chunk. probs: what log_probs gave."""
        events: list[Event] = []
        if self._turn.one_call or self._top is not None:
            used = 0
            for text in text_of_ids(self._stream, chunk, self._decoder):
                if self._cut:
                    break
                if probs:
                    self._unsaid.append((len(text), tuple(probs[used : used + 1])))
                events += self._told(self._followed(self._reader.feed(text)))
                used += 1
            del chunk.ids[used:]
            note_sent(self._turn.served, self._stream, chunk)
        else:
            text = take_text(self._turn.served, self._stream, chunk, self._decoder)
            events += self._followed(self._reader.feed(text))
        if chunk.last and not self._cut:
            events += self._told(self._followed(self._reader.finish()))
            self._cut = False  # the text had ended without it
        if chunk.last:
            self.finish = self._finish(chunk.code)
        events = merged(events)
        self._reasoning += [each.text for each in events if each.kind == REASONING]
        return events

    async def reasoning_tokens(self) -> int:
        """Number of tokens of the reasoning so far, encoded again."""
        return await self._turn.served.count("".join(self._reasoning))

    def _told(self, events: list[Event]) -> list[Event]:
        """The same events, of content with the log probabilities of its tokens: the last ones, as long as the
        text. Tokens in front of these wrote marks, which are no content."""
        if self._top is None or not events:
            return events
        unsaid, self._unsaid = self._unsaid, []
        told: list[Event] = []
        for each in reversed(events):
            log_probs: list[Raw] = []  # the last first
            left = len(each.text) if each.kind == CONTENT else 0
            # A token that is a part of a character writes nothing.
            while unsaid and (left > 0 or (log_probs and not unsaid[-1][0])):
                size, own = unsaid.pop()
                left -= size
                log_probs += own[::-1]
            told.append(each._replace(log_probs=tuple(log_probs[::-1])))
        return told[::-1]

    def _finish(self, code: int) -> str:
        reason = finish_reason(code)
        if (arguments := self._arguments) is not None:
            # Models also write arguments that are no JSON: whether these are whole, only an end token tells.
            own_end = code != protocol.FINISHED_STOP_WORDS
            whole = not arguments.in_brackets if own_end else arguments.complete
            self.stopped_in_call = reason == "stop" and not whole
        if not self.calls or self._turn.tools.named is not None or self.stopped_in_call:
            return reason
        return "tool_calls" if reason == "stop" or self._cut else reason

    def _followed(self, events: list[Event]) -> list[Event]:
        """Follows the calls among events; without parallel ones, the events up to the end of the first, which
        ends the answer."""
        for n, each in enumerate(events):
            if each.kind == CALL:
                if self.calls and self._turn.one_call:  # the arguments before it were no JSON
                    return self._cut_off(events[:n])
                self.calls += 1
                self._arguments = ValueScanner()
            elif each.kind == ARGUMENTS and self._arguments is not None:
                at = self._arguments.feed(each.text, 0)
                if self._arguments.complete and self._turn.one_call:
                    return self._cut_off([*events[:n], each._replace(text=each.text[:at])])
        return events

    def _cut_off(self, events: list[Event]) -> list[Event]:
        self._cut = True
        self._turn.streams.cancel_one(self._stream)
        return events

    def new_call(self, each: Event) -> dict[str, Any]:
        """A call that has just begun, without its arguments."""
        return {
            "id": each.call_id or new_call_id(self._turn.served.tool_format),
            "type": "function",
            "function": {"name": each.text, "arguments": ""},
        }


def chat(served: ServedModel, request: ChatRequest) -> Answering:
    if len({request.max_completion_tokens, request.max_tokens} - {None}) > 1:
        raise field_error("max_tokens", "is an older name of max_completion_tokens; give one of them")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        add_effort(served, variables, request.reasoning_effort, "reasoning_effort")
    conversation = Conversation(
        plain_messages(request.messages, read=served.read),
        read_tools(request.tools, request.tool_choice, request.parallel_tool_calls, read=served.read),
        guide_of(request.response_format, request), request.structured_outputs is None, variables,
        request.documents, request.add_generation_prompt is not False, request.continue_final_message,
        request.add_special_tokens,
    )  # fmt: skip
    turn = Turn(served, conversation, bool(request.stream))
    turn.prepare(request)
    del conversation
    request.messages, request.documents = [], None

    async def answer() -> Response:
        field = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
        await turn.submit(
            request, request.n or 1, getattr(request, field), field, bool(request.logprobs),
            request.top_logprobs or 0, request.prompt_logprobs,
        )  # fmt: skip
        return respond(served, turn.streams, _Reply(turn, request), request.stream)

    return answer


def add_effort(served: ServedModel, variables: dict[str, Any], effort: Any, param: str) -> None:
    """Gives it to the template. `none` switches reasoning off instead, if there is a switch.
    param: the field's place in the request. Raises ApiError where chat_template_kwargs says another one, and
    for an effort that the template has not, unless the server is to ignore it."""
    other = variables.get("reasoning_effort", effort)
    if other != effort:
        raise field_error(
            param, f"is {shown(effort)}, but chat_template_kwargs says {shown(other)}; give one of them"
        )
    if not isinstance(effort, str):
        raise wrong_value(param, effort, "a text, such as low")
    template = served.template
    if template is None:
        variables["reasoning_effort"] = effort
    elif effort == "none" and template.switch is not None and template.reads(template.switch):
        variables.pop("reasoning_effort", None)
        variables.setdefault(template.switch, False)
    elif template.reads("reasoning_effort"):
        variables["reasoning_effort"] = template.effort(effort)
    elif effort == "none":
        pass
    elif served.model.ignore_effort:
        say_once(
            "openai: an effort of reasoning is ignored: the chat template makes no use of reasoning_effort"
        )
    else:
        raise field_error(
            param,
            f"is {shown(effort)}, but the checkpoint's chat template makes no use of"
            " reasoning_effort. Leave it out, or start the server with --ignore-effort",
        )


class _Reply(Choices):
    def __init__(self, turn: Turn, request: ChatRequest) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(turn.served, request, turn.streams, "chatcmpl", kind)
        self._turn, self._request = turn, request
        self._answers = [Answer(turn, stream) for stream in turn.streams.all]
        self._top = request.top_logprobs or 0

    async def _take(self, stream: Stream, chunk: Chunk) -> list[Event]:
        self._usage.note(stream, chunk)
        answer = self._answers[stream.index]
        events = answer.take(chunk)
        if answer.finish is not None and self._turn.served.reasoning_format != "none":
            self._usage.reasoned(stream, await answer.reasoning_tokens())
        return events

    async def body(self) -> dict[str, Any]:
        events: list[list[Event]] = [[] for _ in self._answers]
        chunks: list[list[Chunk]] = [[] for _ in self._answers]
        async for stream, chunk in self._turn.streams:
            events[stream.index] += await self._take(stream, chunk)
            chunks[stream.index].append(chunk)
        body = self._whole(self._choices(events, chunks))
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._turn.prompt
        if (top := self._request.prompt_logprobs) is not None:
            ids, (whole,) = self._turn.streams.all[0].row.prompt, chunks[0]
            told, texts = PromptLogProbs(ids, whole.prompt_log_probs), self._turn.served.token_texts
            write = partial(prompt_log_probs, told, top, texts)
            body["prompt_logprobs"] = await in_thread_if_many(write, len(told.prompt), top)
        return body

    async def _choices(
        self, events: list[list[Event]], chunks: list[list[Chunk]]
    ) -> AsyncIterator[dict[str, Any]]:
        """What the answer has of each sequence, made when it is sent."""
        for index, answer in enumerate(self._answers):
            probs: list[Raw] = []
            for chunk in chunks[index] if self._request.logprobs else ():
                probs += await token_log_probs(self._turn.served, chunk, self._top)
            choice: dict[str, Any] = {
                "index": index,
                "message": _message(answer, events[index]),
                "logprobs": {"content": probs} if self._request.logprobs else None,
                "finish_reason": answer.finish,
            }
            if self._request.return_token_ids:
                choice["token_ids"] = [token for chunk in chunks[index] for token in chunk.ids]
            yield choice

    async def events(self) -> AsyncIterator[bytes]:
        request = self._request
        begun: set[int] = set()
        probs: dict[int, list[Raw]] = {}  # of tokens whose text is still held back

        def chunk_of(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
            first = not begun
            if index not in begun:
                begun.add(index)
                delta = {"role": "assistant", **delta}
            held = probs.pop(index, None)
            choice: dict[str, Any] = {
                "index": index,
                "delta": delta,
                "logprobs": {"content": held} if held else None,
                "finish_reason": finish,
            }
            more: dict[str, Any] = {}
            if request.return_token_ids:
                choice["token_ids"] = ids.pop(index, [])
                if first:
                    more["prompt_token_ids"] = self._turn.prompt
            return self._event(choice, **more)

        ids: dict[int, list[int]] = {}
        async for stream, chunk in self._turn.streams:
            index = stream.index
            answer = self._answers[index]
            events = await self._take(stream, chunk)
            if request.return_token_ids:
                ids.setdefault(index, []).extend(chunk.ids)
            if request.logprobs:
                probs.setdefault(index, []).extend(await token_log_probs(self._turn.served, chunk, self._top))
            for each in events:
                yield chunk_of(index, _delta(answer, each))
            if answer.finish is not None:
                yield chunk_of(index, {} if index in begun else {"content": ""}, answer.finish)
        yield self._end()


def _message(answer: Answer, events: list[Event]) -> dict[str, Any]:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for each in events:
        if each.kind == CALL:
            calls.append(answer.new_call(each))
        elif each.kind == CONTENT:
            content.append(each.text)
        elif each.kind == REASONING:
            reasoning.append(each.text)
        else:
            calls[-1]["function"]["arguments"] += each.text
    text = "".join(content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not (calls or reasoning) else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(answer: Answer, each: Event) -> dict[str, Any]:
    if each.kind == CONTENT:
        return {"content": each.text}
    if each.kind == REASONING:
        return {"reasoning_content": each.text}
    if each.kind == CALL:
        answer.calls_sent += 1
        return {"tool_calls": [{"index": answer.calls_sent - 1, **answer.new_call(each)}]}
    return {"tool_calls": [{"index": answer.calls_sent - 1, "function": {"arguments": each.text}}]}
