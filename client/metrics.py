# SPDX-License-Identifier: Apache-2.0
"""Numbers of one request and their summary over a run, with the definitions of `vllm bench serve`.

TTFT: request sent to first chunk. ITL: time between consecutive chunks (a chunk may hold several tokens).
Latency: request sent to last chunk. TPOT: (last chunk with tokens - first chunk) / (output tokens - 1), for
requests of at least two output tokens; the last chunk with tokens is the last chunk, unless token counts show
that it is empty, as where a Triton stream ends at its end token. Output tokens per second: output tokens of
all completed requests over the run's duration, which reaches from the run's beginning (the clock that
arrivals are scheduled on) to the end of the last request. Goodput: completed requests per second that keep
within every limit given.

Where a rate and a bound on requests in flight meet, a request may be due before one of the slots is free. No
time holds that wait; the summary says how many requests had one and how long it was.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
SLOT_WAIT_S = 1e-3  # a shorter wait for a slot is the clock's
TIMES = ("ttft", "tpot", "itl", "latency", "first_text", "send_delay")


@dataclass
class RequestRecord:
    """One request. Times in seconds: scheduled, start and end since the run began, the others since
    `start`. slot_wait: how long all slots were taken when it was due, before `scheduled`."""

    index: int
    prompt_tokens: int
    output_tokens: int
    scheduled: float = 0.0
    slot_wait: float = 0.0
    start: float = 0.0
    end: float = 0.0
    ttft: float = 0.0
    first_text: float | None = None
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    chunks: int = 0
    turn: int = 0  # within a conversation
    reported_tokens: int | None = None
    reported_prompt_tokens: int | None = None  # what the server says of a text that the client counted
    accepted_drafts: int | None = None  # tokens that the server's drafts guessed, where it says so
    last_token: float | None = None  # the last chunk that held tokens; None if the chunks did not say
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for a one-token answer."""
        end = self.latency if self.last_token is None else self.last_token
        return (end - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def set_chunk_times(
        self, start: float, times: list[float], first_text: float | None, run_start: float
    ) -> None:
        """Fills the timing fields from absolute chunk times of one clock."""
        self.start = start - run_start
        self.chunks = len(times)
        if times:
            self.ttft = times[0] - start
            self.latency = times[-1] - start
            self.itl = [later - earlier for earlier, later in pairwise(times)]
        self.first_text = None if first_text is None else first_text - start


def check_ends(records: list[RequestRecord]) -> None:
    """A server that gives any stream a finish_reason gives each one: without it, the last chunk is missing.
    TensorRT-LLM's never does."""
    if any(r.finish_reason for r in records):
        for r in records:
            if r.error is None and not r.finish_reason:
                r.error = "stream ended without its last chunk (no finish_reason)"


def percentile_name(which: float) -> str:
    """As in a summary's keys: median, p90, p99.9."""
    return "median" if which == 50 else f"p{which:g}"


def _spread(name: str, seconds: list[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """mean, std and the percentiles in milliseconds, each under `<which>_<name>_ms`; None without values."""
    keys = [f"{which}_{name}_ms" for which in ("mean", "std", *map(percentile_name, percentiles))]
    if not seconds:
        return dict.fromkeys(keys)
    ms = np.asarray(seconds) * 1e3
    values = [ms.mean(), ms.std(), *np.percentile(ms, percentiles)]
    return {key: round(float(value), 4) for key, value in zip(keys, values, strict=True)}


def goodput(records: list[RequestRecord], limits: dict[str, float]) -> dict[str, Any]:
    """Requests that keep within all limits (time -> ms; ttft, tpot and latency) per second, and their share
    of all requests. A one-token answer has no TPOT and keeps within any limit of it."""
    good = 0
    for r in records:
        if r.error is None:
            times = {"ttft": r.ttft, "tpot": r.tpot or 0.0, "latency": r.latency}
            good += all(times[name] * 1e3 <= limit for name, limit in limits.items())
    duration = max((r.end for r in records), default=0.0)
    return {
        "goodput_limits_ms": limits,
        "goodput_requests_per_s": round(good / duration, 3) if duration > 0 else 0.0,
        "goodput_share": round(good / len(records), 4) if records else 0.0,
    }


def limits_text(summary: dict[str, Any]) -> str:
    """The limits of goodput in a few words; files of older versions do not name them."""
    limits = summary.get("goodput_limits_ms", {})
    return ", ".join(f"{name} <= {ms:g} ms" for name, ms in limits.items()) or "times within the limits"


def summarise(records: list[RequestRecord], percentiles: Sequence[float] = PERCENTILES) -> dict[str, Any]:
    """Summary of a run; failed requests count only under `failed` and `errors` (message -> how many)."""
    done = [r for r in records if r.error is None]
    errors: dict[str, int] = {}
    for r in records:
        if r.error is not None:
            errors[r.error] = errors.get(r.error, 0) + 1
    duration = max((r.end for r in records), default=0.0)
    output_tokens = sum(r.output_tokens for r in done)
    prompt_tokens = sum(r.prompt_tokens for r in done)
    chunks = sum(r.chunks for r in done)
    slot_waits = [r.slot_wait for r in records if r.slot_wait > SLOT_WAIT_S]
    fewer_chunks = [r for r in done if r.chunks < r.output_tokens]

    def rate(count: int) -> float:
        return round(count / duration, 3) if duration > 0 else 0.0

    summary: dict[str, Any] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors": errors,
        "duration_s": round(duration, 4),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": rate(len(done)),
        "output_tokens_per_s": rate(output_tokens),
        "total_tokens_per_s": rate(prompt_tokens + output_tokens),
        "chunks": chunks,
        "chunks_per_s": rate(chunks),
        "requests_with_checked_length": sum(r.reported_tokens is not None for r in done),
        "requests_with_fewer_chunks_than_tokens": len(fewer_chunks),
        "requests_with_fewer_chunks_unchecked": sum(r.reported_tokens is None for r in fewer_chunks),
        "requests_with_other_prompt_length": sum(
            r.reported_prompt_tokens not in (None, r.prompt_tokens) for r in done
        ),
        "accepted_length": accepted_length(done),
        "requests_that_waited_for_a_slot": len(slot_waits),
        "longest_slot_wait_s": round(max(slot_waits, default=0.0), 4),
    }
    values = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "itl": [gap for r in done for gap in r.itl],
        "latency": [r.latency for r in done],
        "first_text": [r.first_text for r in done if r.first_text is not None],
        # How late the client sent what was due: large values mean that the client, not the server, was
        # measured.
        "send_delay": [r.start - r.scheduled for r in records if r.start],
    }
    for name in TIMES:
        summary |= _spread(name, values[name], percentiles)
    return summary


def accepted_length(records: Sequence[RequestRecord]) -> float | None:
    """Tokens that a step of the server gave a sequence, on average; None where no answer says that it had
    drafts. A step gives one token and the drafts that it accepts."""
    if all(r.accepted_drafts is None for r in records):
        return None
    tokens = sum(r.output_tokens for r in records)
    return round(tokens / max(1, tokens - sum(r.accepted_drafts or 0 for r in records)), 3)


def request_columns(records: list[RequestRecord], with_itl: bool = False) -> dict[str, list[Any]]:
    """Every request's numbers as columns, ordered by index; times in seconds, rounded to a microsecond."""
    rows = []
    for r in sorted(records, key=lambda r: r.index):
        row = asdict(r)
        del row["text"]
        if not with_itl:
            del row["itl"]
        rows.append(row)

    def tidy(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 6)
        return [round(v, 6) for v in value] if isinstance(value, list) else value

    return {key: [tidy(row[key]) for row in rows] for key in rows[0]} if rows else {}


def format_table(summary: dict[str, Any], title: str, percentiles: Sequence[float] = PERCENTILES) -> str:
    """The summary as an aligned text table of up to 80 columns; of the percentiles that it holds, these."""
    lines = [*title.splitlines(), "-" * max(48, *map(len, title.splitlines()))]
    for key in ("completed", "failed", "duration_s", "prompt_tokens", "output_tokens", "requests_per_s",
                "output_tokens_per_s", "total_tokens_per_s", "chunks_per_s"):  # fmt: skip
        lines.append(f"{key:<28}{summary[key]:>16}")
    if summary.get("accepted_length") is not None:
        lines.append(f"{'accepted_length':<28}{summary['accepted_length']:>16}")
    shown = ["mean", *map(percentile_name, percentiles)]
    lines.append(f"{'ms':<12}" + "".join(f"{which.replace('p', 'P'):>10}" for which in shown))
    for name in TIMES:
        values = [summary[f"{which}_{name}_ms"] for which in shown]
        lines.append(f"{name:<12}" + "".join(f"{'-':>10}" if v is None else f"{v:>10.2f}" for v in values))
    if "goodput_share" in summary:
        lines.append(
            f"goodput {summary['goodput_requests_per_s']} requests/s: {summary['goodput_share']:.1%} of the"
            f" requests have\n{limits_text(summary)}"
        )
    if "retokenized_output_tokens" in summary:
        lines.append(f"the received text is {summary['retokenized_output_tokens']} tokens")
    if "unfinished" in summary:
        lines.append(f"INCOMPLETE: interrupted with {summary['unfinished']} requests unfinished or not sent")
    if waited := summary.get("requests_that_waited_for_a_slot"):
        longest = f"{summary['longest_slot_wait_s']:.3g} s"
        lines.append(f"{waited} requests were due before a slot was free, by up to {longest}:")
        lines.append("the rate was not offered, and no time above holds that wait")
    if "busiest_worker_cpu" in summary:
        share = f"{summary['busiest_worker_cpu']:.0%}"
        lines.append(f"busiest of {summary['client_workers']} workers used {share} of a core")
    if unchecked := summary["requests_with_fewer_chunks_unchecked"]:
        lines.append(
            f"{unchecked} requests had fewer chunks than tokens: merged or lost ones (--check-tokens)"
        )
    if other := summary["requests_with_other_prompt_length"]:
        lines.append(f"{other} prompts had another number of tokens by the server's own count")
    for message, count in sorted(summary["errors"].items(), key=lambda item: -item[1]):
        lines.append(f"FAILED {count} x: {message}")
    return "\n".join(lines)
