# SPDX-License-Identifier: Apache-2.0
"""Makes grammars of what requests ask for, for the checkpoint's tokenizer."""

import json
import re
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flashinfer_backend.core.bounds import GRAMMAR
from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import CALLS_GUIDE, CHOICE_GUIDE, CONTENT, GRAMMAR_TYPES
from flashinfer_backend.core.values import encodable
from flashinfer_backend.structured.ebnf import lark_grammar
from flashinfer_backend.structured.grammar import Grammar, GrammarError, matcher_error
from flashinfer_backend.structured.json_schema import SchemaChecks, checked_schema, parse_schema
from flashinfer_backend.structured.regex import escaped, rust_regex
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer

# Where a grammar would take more, llguidance refuses it, or ends the request whose mask it is
# (docs/notes/guides.md).
LIMITS: dict[str, Any] = {
    "max_grammar_size": 50_000,  # symbols
    "initial_lexer_fuel": 500_000,  # some 0.5 s and 60 MB
    "max_lexer_states": 50_000,  # of some 600 bytes each
    "step_max_items": 10_000,  # some 30 ms
    "step_lexer_fuel": 200_000,  # some 15 ms
    "max_items_in_row": 2000,
}
# Of all sequences that have a slot; of many, each has fewer than by LIMITS, but for the least.
ALL_STATES, LEAST_STATES = 256 * LIMITS["max_lexer_states"], 5000
MOST_REASON = 300  # characters of a message: some repeat the grammar
# Blanks between two elements of JSON: enough for deep indentation, an end for models that write nothing else.
BLANKS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
# Without it, where one text alone may follow, llguidance looks for its tokens at every step: 6 ms of 20 000
# characters. It would also allow but the tokenizer's own way of writing them.
HEAD = '%llguidance {"no_forcing": true}\n'
SCHEMA_PLACE = re.compile(r"%json (\d+)")


# Special tokens that are text for some grammars: none, all of them (None), or those of calls where the answer
# can be JSON instead.
MISTRAL_MARKS, LLAMA_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), ("<|python_tag|>",)
HARMONY_MARK = "<|channel|>"


class GrammarCompiler:
    """llguidance with the checkpoint's tokenizer, for up to `slots` sequences. Any thread may use it."""

    def __init__(self, model_dir: str, vocab_size: int, slots: int = 1) -> None:
        self._model_dir, self._vocab_size, self._states = model_dir, vocab_size, states_of(slots)
        self._loading = threading.Lock()
        self._texts: TokenTexts | None = None
        self._tokenizers: dict[str, Any] = {}  # llguidance.LLTokenizer, by which special tokens are text

    def load(self, special_as_text: Collection[str] | None = ()) -> Any:
        """The llguidance.LLTokenizer; a large vocabulary takes a second, further views of it less.
        special_as_text: the special tokens that count as their text, None for all of them."""
        with self._loading:
            key = json.dumps(special_as_text)
            if key not in self._tokenizers:
                try:
                    if self._texts is None:
                        self._texts = TokenTexts(resolve_model_dir(self._model_dir), self._vocab_size)
                    self._tokenizers[key] = self._texts.tokenizer(special_as_text)
                except ImportError as error:
                    raise GrammarError(
                        f"guided decoding needs the package llguidance ({error}); install it, or set"
                        " guided_decoding_backend none"
                    ) from error
                except (OSError, ValueError) as error:
                    raise GrammarError(
                        f"guided decoding needs the checkpoint's tokenizer: {error}"
                    ) from error
            return self._tokenizers[key]

    def load_all(self) -> None:
        """Load what grammars of any kind can need, so that no request waits for it."""
        self.load()
        special = self._texts.special if self._texts is not None else {}
        marks = [marks for marks in (MISTRAL_MARKS, LLAMA_MARKS) if marks[0] in special]
        if marks or HARMONY_MARK in special:
            self.load(None)
        for each in marks:
            self.load(each)

    def compile(self, grammar_type: str, text: str, end_id: int) -> Grammar:
        """A Grammar in its first state; or GrammarError, which says what is wrong. end_id: Grammar's."""
        if grammar_type not in (*GRAMMAR_TYPES, CALLS_GUIDE, CHOICE_GUIDE):
            raise GrammarError(
                f"guided_decoding_guide_type is {grammar_type[:MOST_REASON]!r}; it should be one of"
                f" {', '.join(GRAMMAR_TYPES)}"
            )
        if len(text) > GRAMMAR.characters:
            raise GrammarError(
                f"guided_decoding_guide has {len(text)} characters as a grammar; it should have at most"
                f" {GRAMMAR.characters}"
            )
        special: Collection[str] | None = ()
        refusal = f"guided_decoding_guide is not a valid {grammar_type}: {{}}"
        try:
            if grammar_type == CALLS_GUIDE:
                guide = parse_schema(text)
                special, refusal = guide["special_tokens"], guide["refusal"]
                source = _calls(guide["lark"], guide["schemas"], guide["functions"])
            else:
                source = lark_source(grammar_type, text)
            if len(source) > GRAMMAR.written:
                raise GrammarError(
                    f"written out, it has {len(source)} characters; it should have at most {GRAMMAR.written}"
                )
            tokenizer = self.load(special)
            matcher = make_matcher(tokenizer, source, self._states)
            return Grammar(matcher, tokenizer, end_id, self._vocab_size)
        except GrammarError as error:
            reason = encodable(str(error))
            if len(reason) > MOST_REASON:
                reason = reason[: MOST_REASON - 3] + "..."
            raise GrammarError(refusal.format(reason)) from error


def states_of(slots: int) -> int:
    """The most states that a sequence's grammar can come to, where as many sequences have one."""
    return max(LEAST_STATES, min(LIMITS["max_lexer_states"], ALL_STATES // slots))


def make_matcher(tokenizer: Any, source: str, states: int = LIMITS["max_lexer_states"]) -> Any:
    """llguidance.LLMatcher of a Lark grammar. Raises GrammarError."""
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS | {"max_lexer_states": states}, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(matcher_error(matcher))
    return matcher


def lark_source(grammar_type: str, text: str) -> str:
    """The Lark grammar of a request's. Raises GrammarError."""
    if grammar_type == "regex":
        return f"{HEAD}start: /{rust_regex(text, whole=True)}/"
    if grammar_type == CHOICE_GUIDE:
        return f"{HEAD}start: /{'|'.join(map(escaped, json.loads(text)))}/"
    if grammar_type == "ebnf_grammar":
        return HEAD + lark_grammar(text)
    schema = checked_schema(parse_schema(text) if grammar_type == "json_schema" else {})
    if schema is False:
        raise GrammarError("the schema is false, which no value satisfies")
    return f"{HEAD}start: %json {json.dumps({'x-guidance': BLANKS, **schema})}"


def _calls(lark: str, schemas: list[Any], functions: dict[str, Any]) -> str:
    """The Lark grammar of openai/strict.py with its schemas. In these {"function": name, "at": pointer} is
    a part of a function's parameters, or of the content's schema, whose name is CONTENT."""
    checks = SchemaChecks()

    def filled(node: Any) -> Any:
        if isinstance(node, list):
            return [filled(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "function" not in node:
            return {name: filled(item) for name, item in node.items()}
        name = node["function"]
        try:
            return checks.check(functions[name], node["at"])
        except GrammarError as error:
            what = "response_format" if name == CONTENT else f"the parameters of {name}"
            raise GrammarError(f"{what}: {error}") from error

    written = []
    for schema in schemas:
        checks = SchemaChecks(checks.steps)
        document = filled(schema)
        if not isinstance(document, dict):
            document = {"not": {}}  # false: llguidance says what no value satisfies
        written.append(json.dumps({"x-guidance": BLANKS, **document, "$defs": checks.definitions}))
    return SCHEMA_PLACE.sub(lambda found: f"%json {written[int(found[1])]}", lark)


class Vocabulary:
    """What llguidance asks of a tokenizer. It encodes nothing, which HEAD makes unnecessary."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class TokenTexts:
    """The bytes of each token of a checkpoint folder's tokenizer, for logits of vocab_size tokens; `special`:
    its special tokens by their texts. Raises OSError or ValueError."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        tokenizer = TextTokenizer(folder)
        added = tokenizer.backend.get_added_tokens_decoder().items()
        self.special = {token.content: i for i, token in added if token.special and i < vocab_size}
        # Tokens without text are never allowed: special ones, and those that only pad the vocabulary.
        written = DeltaDecoder(tokenizer.backend, skip_special_tokens=False)
        self._tokens, self._end = [written.piece(i) for i in range(vocab_size)], tokenizer.eos_id

    def tokenizer(self, special_as_text: Collection[str] | None = ()) -> Any:
        """An llguidance.LLTokenizer. special_as_text: as of GrammarCompiler.load."""
        import llguidance

        tokens, end = self._tokens.copy(), self._end
        special = {i for i, token in enumerate(tokens) if not token}
        if special_as_text is not None:
            special |= {i for text, i in self.special.items() if text not in special_as_text}
        if end is None or end >= len(tokens):
            end = next(iter(special), len(tokens))  # stands for the end in masks alone
            if end == len(tokens):
                tokens.append(b"")
        for i in special | {end}:
            tokens[i] = tokens[i] or b"<%d>" % i
        vocabulary = Vocabulary(tokens, sorted(special | {end}), end)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=len(tokens))
