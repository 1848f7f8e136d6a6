# SPDX-License-Identifier: Apache-2.0
"""Compiles guides to grammars for the checkpoint's tokenizer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from flashinfer_backend.core.paths import resolve_model_dir
from flashinfer_backend.core.sampling_params import CALLS_GUIDE, CONTENT, GRAMMAR_TYPES
from flashinfer_backend.structured.grammar import GrammarError
from flashinfer_backend.structured.json_schema import prepare_schema
from flashinfer_backend.structured.lengths import has_lengths, with_counted_lengths
from flashinfer_backend.structured.regex import WITHOUT_ESCAPES, prepare_regex
from flashinfer_backend.text.tokenizer import TextTokenizer

# Blanks between two elements of JSON: enough for deep indentation, an end for models that write nothing else.
MOST_BLANKS = 20
# "[12:00:00] /project/cpp/x.cc:1: Check failed: (ok) is false: " in front of xgrammar's messages
SOURCE_POSITION = r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?"
MOST_REASON = 300  # characters of a message: some repeat the guide


class GrammarCompiler:
    """xgrammar and the checkpoint's tokenizer, which are loaded with the first guide."""

    def __init__(self, model_dir: str, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._loading = threading.Lock()
        self._special: dict[str, Any] = {}  # further compilers, by which special tokens are text

    def load(self) -> Any:
        """An xgrammar.GrammarCompiler, for any thread."""
        with self._loading:
            return self._compiler

    def compile(self, grammar_type: str, text: str) -> Any:
        """An xgrammar.CompiledGrammar; or GrammarError, which says what is wrong with the guide."""
        compiler = self.load()
        try:
            if grammar_type == CALLS_GUIDE:
                tag = json.loads(text)
                if tag["special_tokens"] != []:
                    compiler = self._with_special_tokens(tag["special_tokens"])
                compiled = {"type": "structural_tag", "format": _prepared(tag["format"], tag["functions"])}
                return _compile_tag(compiler, json.dumps(compiled, ensure_ascii=False))
            if grammar_type == "json":
                return compiler.compile_builtin_json_grammar()
            if grammar_type == "json_schema":
                schema = prepare_schema(text, is_safe_pattern)
                return compile_schema(compiler, schema)
            if grammar_type == "regex":
                return compiler.compile_regex(prepare_regex(text))
            if grammar_type == "ebnf_grammar":
                return compiler.compile_grammar(text)
        except Exception as error:  # xgrammar raises RuntimeError with a source position in front
            reason = re.sub(SOURCE_POSITION, "", str(error)[: 2 * MOST_REASON].strip())
            if len(reason) > MOST_REASON:
                reason = reason[: MOST_REASON - 3] + "..."
            if grammar_type == CALLS_GUIDE:
                beside = " and response_format" if CONTENT in tag["functions"] else ""
                raise GrammarError(
                    f"strict functions{beside}: {reason}; leave such keywords or strict out"
                ) from error
            raise GrammarError(f"guided_decoding_guide is not a valid {grammar_type}: {reason}") from error
        raise GrammarError(
            f"guided_decoding_guide_type is {grammar_type[:MOST_REASON]!r}; it should be one of"
            f" {', '.join(GRAMMAR_TYPES)}"
        )

    @cached_property
    def _compiler(self) -> Any:
        return self._make([])

    def _with_special_tokens(self, as_text: list[str] | None) -> Any:
        with self._loading:
            key = str(as_text)
            if key not in self._special:
                self._special[key] = self._make(as_text)
            return self._special[key]

    def _make(self, as_text: Collection[str] | None) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarError(
                f"guided decoding needs the package xgrammar ({error}); install it, or set"
                " guided_decoding_backend none"
            ) from error
        try:
            info = tokenizer_info(resolve_model_dir(self._model_dir), self._vocab_size, as_text)
        except (OSError, ValueError) as error:
            raise GrammarError(f"guided decoding needs the checkpoint's tokenizer: {error}") from error
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compile_schema(compiler: Any, schema: str) -> Any:
    """xgrammar.CompiledGrammar of a schema as prepare_schema writes it."""
    if has_lengths(schema):
        import xgrammar

        grammar = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=MOST_BLANKS)
        return _compile_counted(compiler, grammar)
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_BLANKS)


def _compile_tag(compiler: Any, tag: str) -> Any:
    """The same of a structural tag with such schemas."""
    if has_lengths(tag) and r"\u0000" not in tag:  # xgrammar prints a text up to its first NUL
        import xgrammar

        return _compile_counted(compiler, xgrammar.Grammar.from_structural_tag(tag))
    return compiler.compile_structural_tag(tag)


def _compile_counted(compiler: Any, grammar: Any) -> Any:
    printed = str(grammar)
    counted = with_counted_lengths(printed)
    return compiler.compile_grammar(grammar if counted == printed else counted)


def _prepared(tag: dict[str, Any], functions: dict[str, Any]) -> dict[str, Any]:
    """A structural tag of openai/strict.py with schemas as xgrammar keeps to them. functions: the schemas of
    their parameters, and under CONTENT that of the content, where there is one. Raises GrammarError."""
    found = dict(tag)
    function = found.pop("function", None)
    if function is not None:
        try:
            schema = prepare_schema(json.dumps(functions[function]), is_safe_pattern, found.pop("at"))
        except ValueError as error:
            what = "response_format" if function == CONTENT else f"the parameters of {function}"
            raise GrammarError(f"{what}: {error}") from error
        return found | {"json_schema": json.loads(schema), "max_whitespace_cnt": MOST_BLANKS}
    for key in ("elements", "rules"):
        if key in found:
            found[key] = [
                _prepared(one, functions) if isinstance(one, dict) else [one[0], _prepared(one[1], functions)]
                for one in found[key]
            ]
    if isinstance(found.get("content"), dict):
        found["content"] = _prepared(found["content"], functions)
    return found


def is_safe_pattern(pattern: str) -> bool:
    """Whether all that xgrammar makes of a JSON schema's pattern, in ASCII, is a JSON string. Where it has no
    automaton for it, it takes the characters as they are."""
    import xgrammar

    grammar = str(xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern})))
    return bool(
        re.search(r"^root_1 ::= Regex\(", grammar, re.MULTILINE) or WITHOUT_ESCAPES.fullmatch(pattern)
    )


def tokenizer_info(folder: Path, vocab_size: int, as_text: Collection[str] | None = ()) -> Any:
    """xgrammar.TokenizerInfo of a checkpoint folder, for logits of vocab_size tokens. as_text: the special
    tokens that count as their text, None for all of them."""
    import xgrammar

    tokenizer = TextTokenizer(folder)
    special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values() if t.special}
    special -= special if as_text is None else set(as_text)
    # Tokens without text are never allowed: special ones, and those that only pad the vocabulary.
    vocab = [""] * vocab_size
    for token, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if i < vocab_size and token not in special:
            vocab[i] = token
    found = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.backend.to_str())
    end = tokenizer.eos_id
    return xgrammar.TokenizerInfo(
        vocab,
        vocab_type=found["vocab_type"],
        vocab_size=vocab_size,
        stop_token_ids=[end] if end is not None and end < vocab_size else None,
        add_prefix_space=found["add_prefix_space"],
    )
