# SPDX-License-Identifier: Apache-2.0
"""Talk to a model in the terminal.

python -m client chat
python -m client chat --backend openai-chat --url http://127.0.0.1:9000

Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. Through
OpenAI's API the server applies the model's chat template. Triton's ensemble
gets one text: --form says how the conversation is written in it.
"""

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from client.arguments import INT32, argument_parser, finite, http_url, integer, json_object, seconds
from client.events import ServerError, post_events, why_unreachable
from client.ready import first_ensemble, first_model
from client.wire import delta_thought

with suppress(ImportError):
    import readline  # noqa: F401 - input() then has a history and can be edited

HELP = """\
/help             this
/system TEXT      set the system prompt; without TEXT show it; /system - removes it
/reset            forget the conversation, keep the system prompt
/history          show the conversation
/retry            answer the last question again
/set NAME VALUE   a sampling option: temperature, top_p, max_tokens, seed ...; VALUE - unsets it
/quit             leave, as Ctrl-D does
A line that ends with \\ goes on in the next. Ctrl-C stops an answer."""

# What follows the error of a server that is asked for its models, by the error's status.
HINTS: dict[int | None, str] = {
    HTTPStatus.UNAUTHORIZED: "; --api-key-env NAME gives a key",
    HTTPStatus.NOT_FOUND: "; it has no OpenAI API (Triton's ensemble: --backend triton)",
}
# Of a request's body: what the conversation says, and no option.
OF_THE_CHAT = frozenset({"text_input", "messages", "stream", "model", "prompt"})
OPTIONS = ("max_tokens", "temperature", "top_p")  # of the body, with options of their own here
MAX_TOKENS = 512


@dataclass(frozen=True)
class Form:
    """How a conversation is written as one text. Each of system, user and answer has {} for its text; opening
    stands where the model is to go on. stop: words that show that the model went on for the user."""

    system: str
    user: str
    answer: str
    opening: str
    stop: tuple[str, ...]

    def write(self, system: str, turns: Sequence[str]) -> str:
        """The prompt: turns are the user's and the model's, the user's last."""
        parts = [self.system.format(system)] if system else []
        for number, text in enumerate(turns):
            parts.append((self.answer if number % 2 else self.user).format(text))
        return "".join(parts) + self.opening


FORMS = {
    "plain": Form("{}\n\n", "User: {}\n", "Assistant: {}\n", "Assistant:", ("\nUser:",)),
    "question": Form("{}\n", "Question: {}\n", "Answer: {}\n", "Answer:", ("\nQuestion:",)),
    "chatml": Form(
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n",
        "<|im_start|>assistant\n{}<|im_end|>\n",
        "<|im_start|>assistant\n",
        ("<|im_end|>",),
    ),
    "llama3": Form(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|eot_id|>",),
    ),
}


@dataclass
class Answer:
    """What is known of an answer. text: without what the model thought. tokens as the server counts them, or
    None."""

    text: str = ""
    chunks: int = 0
    tokens: int | None = None
    ttft: float = 0.0
    seconds: float = 0.0
    stopped: bool = False

    def statistics(self) -> str:
        count = self.chunks if self.tokens is None else self.tokens
        unit = "chunks" if self.tokens is None else "tokens"
        words = [f"{count} {unit}"]
        if self.chunks:
            words.append(f"TTFT {self.ttft * 1e3:,.0f} ms")
        if count > 1 and self.seconds > self.ttft:
            words.append(
                f"{(count - 1) / (self.seconds - self.ttft):,.1f} {'tok' if unit == 'tokens' else unit}/s"
            )
        words.append(f"{self.seconds:.1f} s")
        return ", ".join(words) + (", stopped" if self.stopped else "")


@dataclass
class Chat:
    """A conversation with one server. turns: the user's and the model's texts."""

    backend: str
    url: str
    model: str
    form: Form
    timeout: float
    api_key: str | None = None
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)

    def request(self) -> tuple[str, dict[str, Any]]:
        """URL and body for the turns so far."""
        base = self.url.rstrip("/")
        if self.backend == "openai-chat":
            said = [{"role": "system", "content": self.system}] if self.system else []
            roles = ("user", "assistant")
            said += [{"role": roles[i % 2], "content": text} for i, text in enumerate(self.turns)]
            body: dict[str, Any] = {"model": self.model, "messages": said, "stream": True}
            body["stream_options"] = {"include_usage": True}
            return f"{base}/v1/chat/completions", body | self.options
        body = {"text_input": self.form.write(self.system, self.turns), "stream": True}
        body |= {"stop_words": list(self.form.stop), "return_num_output_tokens": True}
        body |= {"exclude_stop_words_in_output": True, "exclude_input_in_output": True}
        return f"{base}/v2/models/{self.model}/generate_stream", body | self.options

    def stream(self, answer: Answer) -> Generator[tuple[str, str], None, None]:
        """The answer's deltas: what the model thinks, and what it says. Fills `answer` on the way. Closing it
        closes the connection, which cancels the request. Raises ServerError."""
        url, body = self.request()
        began = time.monotonic()
        for event in post_events(url, body, self.timeout, self.api_key):
            thought, text = self._delta(event, answer)
            if thought is None and text is None:
                continue
            answer.chunks += 1
            answer.seconds = time.monotonic() - began
            answer.ttft = answer.ttft or answer.seconds
            answer.text += text or ""
            yield thought or "", text or ""

    def _delta(self, event: dict[str, Any], answer: Answer) -> tuple[str | None, str | None]:
        """What an event says that the model thinks, and that it says; None where it holds none."""
        if self.backend == "openai-chat":
            if event.get("usage"):
                answer.tokens = int(event["usage"]["completion_tokens"])
            delta = event["choices"][0].get("delta") or {} if event.get("choices") else {}
            return delta_thought(delta) or None, delta.get("content") or None
        if "num_output_tokens" in event:
            answer.tokens = (answer.tokens or 0) + int(event["num_output_tokens"])
        return None, str(event["text_output"])


class Terminal:
    """Reads lines and runs commands; colours only where the output is a terminal."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._colour else text

    def say(self, text: str) -> None:
        print(self._dim(text), flush=True)

    def read(self) -> str | None:
        """The user's next text, or None at the end. Ctrl-C empties the line."""
        lines: list[str] = []
        while True:
            try:
                line = input(("... " if lines else "you> ") if sys.stdin.isatty() else "")
            except EOFError:
                if sys.stdin.isatty():
                    print()
                return "\n".join(lines) if lines else None  # a line that was to go on, and the end
            except KeyboardInterrupt:
                print()
                self.say("(Ctrl-D or /quit leaves)")
                lines = []
                continue
            if any("\udc80" <= letter <= "\udcff" for letter in line):
                self.say(f"this line is not text in {sys.stdin.encoding} and was left out")
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def run(self) -> int:
        """Until the user leaves."""
        while (text := self.read()) is not None:
            if text.strip().startswith("/"):
                if self.command(text.strip()):
                    return 0
            elif text.strip():
                self.ask(text)
        return 0

    def ask(self, text: str) -> None:
        """Sends the text and prints the answer as it comes, what the model thinks before it. That is no part
        of the conversation, as models are trained. What failed leaves no trace in the conversation; an answer
        that was stopped stays as far as it came."""
        chat, answer = self.chat, Answer()
        chat.turns.append(text)
        stream = chat.stream(answer)

        def stop(*_: object) -> None:
            answer.stopped = True  # also where the exception is lost: in a destructor, say
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, stop)
        try:
            thinks, begun = False, False
            for thought, piece in stream:
                if answer.stopped:
                    raise KeyboardInterrupt
                if thought:
                    print(self._dim(thought if thinks else thought.lstrip()), end="", flush=True)
                    thinks = True
                shown = piece if begun else piece.lstrip()
                if shown and thinks and not begun:
                    print("\n")
                begun = begun or bool(shown)
                print(shown, end="", flush=True)
        except KeyboardInterrupt:
            answer.stopped = True
            stream.close()
        except (ServerError, AttributeError, LookupError, ValueError, TypeError) as error:
            chat.turns.pop()
            print(flush=True)
            known = isinstance(error, ServerError)
            print(
                f"error: {error if known else f'an answer that is none: {error!r}'}",
                file=sys.stderr,
                flush=True,
            )
            return
        finally:
            signal.signal(signal.SIGINT, before)
        print(flush=True)
        if answer.text:
            chat.turns.append(answer.text.strip())
        else:  # it ended, or was stopped, before it began
            chat.turns.pop()
        self.say(f"[{answer.statistics()}]")

    def command(self, line: str) -> bool:
        """Runs a command; whether it was the one to leave."""
        name, _, rest = line.partition(" ")
        rest, chat = rest.strip(), self.chat
        if name in ("/quit", "/exit"):
            return True
        if name == "/help":
            self.say(HELP)
        elif name == "/reset":
            chat.turns.clear()
            self.say("the conversation is forgotten")
        elif name == "/system":
            if rest:
                chat.system = "" if rest == "-" else rest
            self.say(f"system prompt: {chat.system or 'none'}")
        elif name == "/history":
            said = [f"system: {chat.system}"] if chat.system else []
            said += [f"{'model' if i % 2 else 'you'}: {text}" for i, text in enumerate(chat.turns)]
            self.say("\n".join(said) or "nothing was said yet")
        elif name == "/retry":
            if chat.turns:
                before = chat.turns[-2:]
                del chat.turns[-2:]
                length = len(chat.turns)
                self.ask(before[0])
                if len(chat.turns) == length:  # it failed: the earlier answer stays
                    chat.turns += before
            else:
                self.say("nothing was asked yet")
        elif name == "/set":
            self._set(rest)
        else:
            self.say(f"there is no command {name}; /help lists them")
        return False

    def _set(self, rest: str) -> None:
        option, _, text = rest.partition(" ")
        if option in OF_THE_CHAT:
            self.say(f"{option} is what the conversation says; it cannot be set")
        elif option and text == "-":
            self.chat.options.pop(option, None)
        elif option and text:
            try:
                self.chat.options[option] = json.loads(text)
            except ValueError:
                self.chat.options[option] = text
        elif option:
            self.say("/set NAME VALUE, such as /set temperature 0.7")
        self.say(
            ", ".join(f"{name} = {value}" for name, value in self.chat.options.items()) or "nothing is set"
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argument_parser("client chat", __doc__)
    p.add_argument("--backend", choices=("triton", "openai-chat"), default="triton", help="default: triton")
    p.add_argument(
        "--url", type=http_url, help="the server (default: http://127.0.0.1:8000; openai-chat: port 9000)"
    )
    p.add_argument(
        "--model", help="the server's model (default: ensemble, or the first that an OpenAI server lists)"
    )
    p.add_argument("--form", choices=FORMS, help="triton: how to write the conversation (default: plain)")
    p.add_argument("--system", default="", help="system prompt")
    p.add_argument(
        "--max-tokens", type=integer(1, INT32[1]), metavar="N",
        help=f"most tokens of an answer (default: {MAX_TOKENS})",
    )  # fmt: skip
    p.add_argument("--temperature", type=finite, metavar="X", help="0: greedy (default: the server's)")
    p.add_argument(
        "--top-p", type=finite, metavar="X", help="share of the likeliest tokens (default: the server's)"
    )
    p.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON",
        help='fields laid over each request, such as {"top_k": 5}',
    )  # fmt: skip
    p.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API's key")
    p.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S",
        help="give up after S seconds without an answer (default: %(default)g)",
    )  # fmt: skip
    args = p.parse_args(argv)
    if args.form and args.backend != "triton":
        p.error("argument --form: an OpenAI server applies its chat template; --form is for --backend triton")
    if told := sorted(OF_THE_CHAT & args.extra_body.keys()):
        p.error(f"argument --extra-body: {told[0]} is what the conversation says; leave it out")
    if twice := [name for name in OPTIONS if getattr(args, name) is not None and name in args.extra_body]:
        p.error(f"argument --extra-body: {twice[0]} is given by --{twice[0].replace('_', '-')} already")
    if args.temperature == 0 and args.top_p is not None:
        p.error("argument --top-p: --temperature 0 is greedy and takes no notice of it; leave out one")
    if args.api_key_env is not None and not os.environ.get(args.api_key_env):
        p.error(f"argument --api-key-env: there is no environment variable {args.api_key_env}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # models write what not every terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text are met in their line
        sys.stdin.reconfigure(errors="surrogateescape")
    port = 8000 if args.backend == "triton" else 9000
    url, model = args.url or f"http://127.0.0.1:{port}", args.model
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    if model is None:
        try:
            model = first_ensemble(url, key) if args.backend == "triton" else first_model(url, key)
        except (OSError, ValueError) as error:
            hint = HINTS.get(getattr(error, "code", None), "")
            print(f"error: {url}: {why_unreachable(error)}{hint}", file=sys.stderr)
            return 1
    options = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    options = {"max_tokens": MAX_TOKENS} | options | args.extra_body
    form = FORMS[args.form or "plain"]
    chat = Chat(args.backend, url, model, form, args.timeout, key, args.system, options)
    terminal = Terminal(chat)
    terminal.say(f"{model} at {url}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    return terminal.run()
