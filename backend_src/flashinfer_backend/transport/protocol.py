# SPDX-License-Identifier: Apache-2.0
"""What crosses the socket between Triton's Python stubs and the engine process.

The engine binds one ZeroMQ ROUTER socket at `<run dir>/engine.sock`; each stub connects a
DEALER. Stub to engine: one frame, a msgpack-encoded `ToEngine` message. Engine to stub: a
one-byte kind, then its payload:

    TOKENS   int32 [n, 3] little endian (local id, token id, finish code); the tokens of a
             sequence follow each other, and the last one alone has a finish code.
             Optionally followed by one more frame, a msgpack list of `RowReport` (one at
             most of a row, whose sequence and turn it names), and a frame for each of
             these that has context logits
    FAILURE  msgpack `Failure`
    STATUS   msgpack `Status`
    PROFILED msgpack `Profiled`

A request is named by a 64-bit handle: the submitting stub's pid in the high 32 bits and a
counter of that stub, the local id, in the low 32. Token frames carry only the local id,
because a frame goes to the one stub that submitted its rows.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.core.values import encodable

TOKENS = b"T"
FAILURE = b"F"
STATUS = b"S"
PROFILED = b"P"

# Finish codes, third column of a token frame.
RUNNING = 0
FINISHED_END_ID = 1
FINISHED_LENGTH = 2
FINISHED_STOP_WORDS = 3
FINISHED_CANCELLED = 4
NO_TOKEN = -1  # second column of a row that only carries a finish code

# How the refusals begin that mean: later. Clients look for these words; the first are TensorRT-LLM's, the
# others are Triton's own for a request that has waited too long.
QUEUE_FULL = "Maximum queue size"
QUEUE_TIMEOUT = "Request timeout expired"


def make_handle(pid: int, local_id: int) -> int:
    """Handle of a stub's request; both parts must fit 31 bits."""
    return pid << 32 | local_id


def split_handle(handle: int) -> tuple[int, int]:
    """(pid of the submitting stub, local id)."""
    return handle >> 32, handle & 0xFFFFFFFF


SOCKET = "engine.sock"  # in an engine's run directory, from when it is ready


def socket_address(run_dir: Path) -> str:
    return f"ipc://{run_dir / SOCKET}"


class Hello(msgspec.Struct, tag="hello"):
    """First message of a stub. The engine aborts its requests when process `pid` ends."""

    pid: int


class Submit(msgspec.Struct, tag="submit"):
    """One sequence. `prompt`: int32 little-endian token ids. `share_prompt_with`: handle of the
    first sequence with this prompt in the same request (its own, if it is that one), whose prompt blocks
    the others reuse; or 0. `priority`: smaller numbers come first. `timeout_us`: how long it may wait for its
    first step, 0: without limit."""

    handle: int
    prompt: bytes
    params: SamplingParams
    share_prompt_with: int
    priority: int
    timeout_us: int


class Cancel(msgspec.Struct, tag="cancel"):
    """Drop a sequence; it ends with FINISHED_CANCELLED. An unknown handle is not an error."""

    handle: int


class Freed(msgspec.Struct, tag="freed"):
    """The stub holds none of a sequence's logits any more, and expects none: it has all of them, the sequence
    has ended, or it is cancelled. To be said of each sequence that asks for logits, else their room is never
    free. An unknown handle is not an error."""

    handle: int


class Goodbye(msgspec.Struct, tag="goodbye"):
    """The stub leaves; its open sequences are dropped. said: else it has died, and the engine's socket tells
    so."""

    pid: int
    said: bool = True


class Profile(msgspec.Struct, tag="profile"):
    """Trace the next `steps` steps; 0: end and write the trace that is being made. Answered by Profiled."""

    handle: int
    steps: int


ToEngine = Hello | Submit | Cancel | Freed | Profile | Goodbye


class Failure(msgspec.Struct):
    """A sequence that cannot go on; nothing follows for this handle. `refused`: it was never admitted."""

    handle: int
    message: str
    refused: bool = False


class Profiled(msgspec.Struct):
    """files: the trace's files, one for each rank, which appear once they are complete. error: why not;
    refused: as the request does not fit."""

    handle: int
    files: list[str]
    error: str = ""
    refused: bool = False


class Perf(msgspec.Struct):
    """Times in nanoseconds since the epoch, and KV block counts of one sequence: with its first token as of
    then, and when it ends.

    Blocks are those of its prompt, and added up where it was computed again, then with what it had generated:
    allocated ones, of these the ones for which nothing had to leave the cache (new), and reused ones.
    cached_tokens: of its prompt, found in the cache when it was first computed. drafted_tokens: guesses that
    its steps checked; accepted_tokens: of these.
    """

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int
    new_blocks: int
    allocated_blocks: int
    reused_blocks: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class RowReport(msgspec.Struct, omit_defaults=True):
    """What a request asked for with its tokens. Logits are float32 little endian, row major:
    context [prompt_len, vocab], generation [1, vocab] for the row's token, or what a model with pooling gives
    instead. prompt_log_probs: what sampling.logprobs.prompt_log_probs gives, of the tokens from the second
    on. queue_ns comes unasked with the first row of a sequence: nanoseconds until its first step."""

    local_id: int
    turn: int = 0  # rows of the sequence in this frame before its own
    log_prob: float | None = None
    top_logprobs: bytes | None = None  # TOP_LOGPROBS of core/step.py, most likely first
    context_logits: memoryview | None = None  # up to gigabytes: a separate frame
    prompt_log_probs: bytes | None = None
    generation_logits: bytes | None = None
    perf: Perf | None = None
    queue_ns: int | None = None


class Status(msgspec.Struct):
    """The engine's state, sent to each stub after its Hello and periodically."""

    pid: int
    device: str
    vocab_size: int
    max_seq_len: int
    max_input_len: int
    max_num_seqs: int
    block_size: int
    blocks_total: int
    max_queue_size: int = 0  # 0: no limit
    longest_seq_len: int = 0  # the checkpoint's limit
    blocks_used: int = 0
    blocks_cached: int = 0
    # Snapshots of states, where a model keeps some: all, and those that can be found and are not held.
    snapshots: int = 0
    snapshots_cached: int = 0
    requests_active: int = 0
    requests_waiting: int = 0
    requests_running: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    iteration: int = 0
    preemptions: int = 0
    cancellations: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Folders of adapters: those that sequences with a slot have, and those that requests wait for.
    adapters_running: list[str] = []
    adapters_waiting: list[str] = []
    adapters_loaded: int = 0  # times that one was brought to the device
    blocks_reused: int = 0
    logits_bytes: int = 0
    logits_waiting: int = 0
    memory_gpu: int = 0
    timestamp_ns: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_failure = msgspec.msgpack.Decoder(Failure).decode
decode_profiled = msgspec.msgpack.Decoder(Profiled).decode
decode_status = msgspec.msgpack.Decoder(Status).decode
_decode_reports = msgspec.msgpack.Decoder(list[RowReport]).decode
_FOLLOWS = memoryview(b"")  # in the place of context logits, which have their own frame


def encode_answer(message: Failure | Profiled | Status) -> bytes:
    """Text that UTF-8 has not, of a client or of a folder's name, must not end the engine."""
    try:
        return encode(message)
    except UnicodeEncodeError:
        fields = {name: _encodable(getattr(message, name)) for name in message.__struct_fields__}
        return encode(msgspec.structs.replace(message, **fields))


def _encodable(value: object) -> object:
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    return encodable(value) if isinstance(value, str) else value


def pack_tokens(local_ids: np.ndarray, tokens: np.ndarray, codes: np.ndarray) -> bytes:
    """Token frame of n tokens from three integer arrays [n]."""
    frame = np.empty((len(local_ids), 3), dtype="<i4")
    frame[:, 0] = local_ids
    frame[:, 1] = tokens
    frame[:, 2] = codes
    return frame.tobytes()


def unpack_tokens(frame: bytes) -> np.ndarray:
    """int32 [n, 3] view of a token frame."""
    return np.frombuffer(frame, dtype="<i4").reshape(-1, 3)


def with_reports(frame: bytes, reports: list[RowReport]) -> Iterator[tuple[int, int, int, RowReport | None]]:
    """(local id, token, code, report) of each row of a token frame, in order. Takes the reports out of their
    list."""
    by_turn = {(report.local_id, report.turn): report for report in reports}
    reports.clear()
    turns: Counter[int] = Counter()
    for local_id, token, code in unpack_tokens(frame).tolist():
        report = by_turn.pop((local_id, turns[local_id]), None) if by_turn else None
        turns[local_id] += 1
        yield local_id, token, code, report


def pack_reports(reports: list[RowReport]) -> list[bytes | memoryview]:
    """Frames of at least one report. Takes the context logits out of them: each is a frame, so that it is
    neither copied nor kept for as long as one that came with it."""
    frames: list[bytes | memoryview] = [b""]
    for report in reports:
        if report.context_logits is not None:
            frames.append(report.context_logits)
            report.context_logits = _FOLLOWS
    frames[0] = encode(reports)
    return frames


def unpack_reports(frames: list[bytes | memoryview]) -> list[RowReport]:
    """The reports of a message, by its frames behind the tokens; there may be none."""
    if not frames:
        return []
    reports, logits = _decode_reports(frames[0]), iter(frames[1:])
    for report in reports:
        if report.context_logits is not None:
            report.context_logits = memoryview(next(logits))
    return reports
