# SPDX-License-Identifier: Apache-2.0
"""How much one request may hold at either API, so that none keeps a process that serves all of them busy for
seconds, or ends it.

FIELDS has a row for each field that takes text, a list or an object: of the OpenAI API by its name in a body
(openai/requests.py; behind the body's name where it has another bound there), of the Triton models by the
tensor's name (config.pbtxt; the ensemble's by the name that its steps know). Tensors that are refused
whatever they hold are in triton_server/refused.py and triton_server/preprocessing.py instead. Bounds are
checked before any work that grows with the size. GRAMMAR bounds what a guide says.
"""

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bound:
    """values: of one row of a tensor; in JSON elements and members, however deep. size: bytes of text in a
    row; in a body those of the field's JSON; None: what the settings say of prompts and bodies.
    all_values, all_size: the same of all rows of a request together. sequences: over all sequences of a
    request, each of which takes its own to the engine: of values, of a guide's bytes. items: elements of the
    list itself. of: what the values are."""

    values: int
    size: int | None = None
    all_values: int | None = None
    all_size: int | None = None
    sequences: int | None = None
    items: int | None = None
    of: str = "values"


def check(name: str, found: int, most: int | None, of: str, where: str = "") -> None:
    """Raises ValueError where a field holds more than `most` of what `of` says; None: any number."""
    if most is not None and found > most:
        raise ValueError(f"{name} has {found} {of}; it should have at most {most}{where}")


MOST_WORD = 1 << 14  # bytes, or ids, of one stop or bad word: a token that may go on with it takes 0.06 ms
MOST_IDS = 1 << 20  # a second's work for the tokenizer
MOST_TEXTS = 1 << 20  # of a tensor: 256 rows, each padded to 4096 words
MOST_SEQUENCES = 4096  # of one request, as many as can ever run at once: others wait while they are queued
MOST_INPUTS = 2048  # texts of one request for embeddings, documents of one for scores
MOST_CHOICES = 128  # of one request to the OpenAI API: n times its prompts
MOST_LOOSE = 1 << 20  # bytes of a body whose unknown fields may be empty ones: each is looked at
MOST_TOP_LOGPROBS = 20
MOST_LOG_PROBS = 1 << 24  # of one answer without streaming, which are kept until its end: 128 MiB
# Of one prompt, which are written at once: as JSON some 70 bytes each, held up to four times.
MOST_PROMPT_LOG_PROBS = 1 << 18
MOST_UNREAD = 1 << 29  # bytes that a process of the OpenAI API keeps for clients that do not read
MOST_PIPELINED = 16  # requests of one connection without an answer: 14,000 in one read took 0.8 s and 30 MB
MOST_HEADERS = 256  # of a request, with its trailers: 12,500 of three bytes took 6 ms
READ_BYTES = 6 << 10  # of a connection that are parsed at a time: 1024 chunks of one byte take 0.5 ms
READ_S = 0.005  # a turn of a process's event loop parses no longer than this: other clients have their turn
MOST_LATER = 1 << 29  # bytes that have arrived at a process and are not parsed yet
MOST_TRACED_STEPS = 100  # each has thousands of events, and the engine waits while they are written
MOST_GRAMMARS_NS = 20 * 10**9  # of a core, to make the grammars of requests that wait for a slot: some 2 GB
MOST_LISTED_IDS = 1 << 25  # ids in lists of all requests that an engine has, each of up to 90 bytes
BAD_WORD_IDS = 8  # for how many of these an id of a bad word counts: 40 bytes more in each step that has it
# Sequences of one process that an engine has not ended, times what it can run and queue. It would refuse
# more, but only once it has read all of them, and what clients that leave have their processes send.
MOST_SENT = 2
MOST_TASKS = 1024  # ids of adapters whose weights are kept; all of them are looked at with each new one
MOST_KV_CONNECTIONS = 256  # to each port of KV events
MOST_STORED = 4096  # responses that a process of the OpenAI API keeps
MOST_PAGE_ITEMS = 100  # of a list that comes in pages
ALL_PROMPTS = 8  # times what one prompt may have: all prompts of a request to the ensemble

NAME = Bound(1, 4 * KIB)
NUMBER = Bound(1, KIB)  # of the OpenAI API, and true or false: all fields without a row
OPTIONS = Bound(1024, 64 * KIB)
CONVERSATION = Bound(1 << 16, items=4096)  # some templates compare each message with all others
TOOLS = Bound(1 << 16, 4 * MIB)
GUIDE = Bound(1 << 16, MIB, all_size=4 * MIB, sequences=64 * MIB)
WORDS = Bound(4096, 256 * KIB, all_values=1 << 16, all_size=MIB, of="words")
WORD_IDS = Bound(1 << 16, all_values=MOST_IDS, sequences=MOST_IDS, of="ids")


@dataclass(frozen=True)
class GrammarBounds:
    """What a guide can ask of its grammar, whichever field brings it. With these and the limits that
    structured/compiler.py gives the library, making one takes at most 2 s of a core and 100 MB
    (docs/notes/guides.md)."""

    characters: int = 262_144
    written: int = 524_288  # characters of the Lark grammar that it becomes, and steps to check its schemas
    ebnf_characters: int = 65_536
    rules: int = 500  # of EBNF; the library's own recursion ends the process beyond 2000 in a chain
    regex_characters: int = 16_384  # the first mask of a text of 20 000 characters takes 30 ms
    repeats: int = 100_000  # of a part of an expression or rule
    groups: int = 100  # in each other
    subschemas: int = 10_000
    nesting: int = 60  # subschemas in each other, and constants
    levels: int = 1000  # of all that $ref names; 1800 in a chain end a thread with a stack of 2 MiB
    optional: int = 400  # properties of one object: creation takes the square of them
    multiple_of: int = 4096  # the states that it takes; 999 983 took 9 s and 300 MB
    patterns: int = 16  # for one value: 30 take minutes
    tested: int = 4096  # values of an enum times patterns for them; 40 000 take 5 s
    count: int = 100_000  # of a limit of lengths, items or properties


GRAMMAR = GrammarBounds()

FIELDS = {
    # Bodies of the OpenAI API
    "messages": CONVERSATION,
    "input": CONVERSATION,
    "EmbeddingRequest.input": Bound(MOST_IDS),
    "documents": CONVERSATION,
    "RerankRequest.documents": Bound(4 * MOST_INPUTS),  # texts, or objects that hold them
    "query": Bound(1),
    **dict.fromkeys(("ScoreRequest.documents", "queries", "text_1", "text_2"), Bound(MOST_INPUTS)),
    "instruction": NAME,
    "instructions": Bound(1),
    "system": CONVERSATION,
    "suffix": Bound(1),
    "prompt": Bound(MOST_IDS),
    "tokens": Bound(MOST_IDS, of="ids"),
    "stop": WORDS,
    "stop_sequences": WORDS,
    "bad_words": WORDS,
    "stop_token_ids": Bound(4096, 64 * KIB, of="ids"),
    "allowed_token_ids": Bound(1 << 16, MIB, sequences=MOST_IDS, of="ids"),
    "logit_bias": Bound(1 << 14, 512 * KIB, of="ids"),
    "tools": TOOLS,
    "functions": TOOLS,
    "response_format": GUIDE,
    "structured_outputs": GUIDE,
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), GUIDE),
    "text": GUIDE,
    "output_config": GUIDE,
    "chat_template_kwargs": OPTIONS,
    **dict.fromkeys(("metadata", "client_metadata"), OPTIONS),
    "tool_choice": Bound(4096, 256 * KIB),
    **dict.fromkeys(("stream_options", "reasoning", "include", "modalities"), Bound(64, 4 * KIB)),
    **dict.fromkeys(
        ("thinking", "cache_control", "prompt_cache_options", "diagnostics", "thread", "context_management"),
        Bound(64, 4 * KIB),
    ),
    **dict.fromkeys(("audio", "function_call", "prediction", "web_search_options"), OPTIONS),
    "conversation": OPTIONS,
    "mcp_servers": OPTIONS,
    "chat_template": Bound(1, MIB),
    "previous_response_id": NAME,
    **dict.fromkeys((
        "model", "lora_name", "lora_path", "prompt_name", "user", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "service_tier", "speed", "truncation", "verbosity",
        "reasoning_effort",
    ), NAME),
    # Tensors of preprocessing, and so of the ensemble
    "QUERY": Bound(1),
    "STOP_WORDS_DICT": WORDS,
    "BAD_WORDS_DICT": WORDS,
    "EMBEDDING_BIAS_WORDS": WORDS,
    "EMBEDDING_BIAS_WEIGHTS": Bound(WORDS.values),
    # Tensors of llm
    # All as long as the longest: 64 MiB
    "input_ids": Bound(1 << 24, all_values=1 << 24, sequences=1 << 25, of="ids"),
    "stop_words_text": WORDS,
    "stop_words_list": WORD_IDS,
    "bad_words_list": WORD_IDS,
    "embedding_bias": Bound(MIB, sequences=1 << 22, of="biases"),  # sequences: of those that are not 0
    "guided_decoding_guide_type": NAME,
    "guided_decoding_guide": GUIDE,
    "decoder_input_ids": Bound(1, of="ids"),
    # Of an adapter: numbers of one module, 256 x (8192 + 28672) and more. All of them are compared with
    # lora_cache_host_memory_bytes.
    "lora_weights": Bound(1 << 24),
    "lora_config": Bound(3),
    # Tensors of postprocessing
    "TOKENS_BATCH": Bound(1 << 24, all_values=1 << 24, sequences=MOST_IDS, of="ids"),
    "SEQUENCE_LENGTH": Bound(1 << 16, all_values=1 << 16, of="sequences"),
    "CHUNK": Bound(MOST_IDS, all_values=MOST_IDS, of="ids"),
    # What a Triton request has besides its tensors, as JSON
    "parameters": Bound(1 << 12, 16 * KIB),
}  # fmt: skip
