# SPDX-License-Identifier: Apache-2.0
"""Requests that every API can be asked, and the answers that are right.

The reference is the engine in plain torch with one sequence at a time, whole prompts and no prefix cache; its
text is the tokenizer's own decoding, and stop words are looked up in that. So batches, chunks, blocks that
requests share, preemption, streaming and detokenisation are all on the other side.
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from engine.harness import serve, start_core
from flashinfer_backend.core.sampling_params import SamplingParams
from flashinfer_backend.serving.generation import FINISH_REASONS

OPENINGS = [
    "Once upon a time", "The king said to his daughter that", "One day, a little girl named Lily",
    "Tom and his dog", "Ein Mädchen ging in den Wald, und dort", "🙂 says the", "It was raining. The boy",
]  # fmt: skip
QUESTIONS = ["Why is the sky blue?", "Tell me a story.", "What do cats eat?", "Who was the king's wife?"]
LONG = "A long story about a king and his three daughters, who lived in a castle near the sea. "
REGEXES = [
    "(yes|no|maybe), [a-z]{3,8}( [a-z]{2,5}){2}\\.",
    "[0-9]{3}-[0-9]{4}",
    "The (cat|dog) [a-z ]{5,20}!",
]


@dataclass(frozen=True)
class Answer:
    """Of one sequence."""

    text: str
    reason: str


ENDS_CHATS = "\nQuestion:"  # stop_strings of the bundled model's generation_config.json


@dataclass(frozen=True)
class Case:
    """A request and its right answers, one for each sequence. question: of a chat, whose prompt is made of
    it by the chat template. Numbers are such that 32 and 64 bits say the same."""

    prompt: str
    max_tokens: int
    question: str = ""
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    stop: str = ""
    regex: str = ""
    sequences: int = 1
    answers: tuple[Answer, ...] = ()


def drawn(rng: random.Random) -> Case:
    """A case without its answers."""
    question = rng.choice(QUESTIONS) if rng.random() < 0.25 else ""
    prompt = f"Question: {question}\nAnswer:" if question else rng.choice(OPENINGS)
    if not question and rng.random() < 0.3:
        prompt = LONG * rng.choice([1, 3, 3, 12, 30]) + prompt
    case = Case(prompt, rng.choice([1, 2, 8, 16, 24, 24, 40, 64, 120]), question)
    if rng.random() < 0.5:
        case = replace(
            case,
            temperature=rng.choice([0.5, 0.75, 1.25]),
            seed=rng.randrange(1, 1 << 31),
            top_k=rng.choice([0, 0, 5, 50]),
            top_p=rng.choice([1.0, 1.0, 0.875, 0.5]),
            sequences=rng.choice([1, 1, 1, 2, 3]),
        )
    if rng.random() < 0.15:
        penalties = {"repetition_penalty": 1.25, "frequency_penalty": rng.choice([0.0, 0.5])}
        case = replace(case, **penalties)
    if rng.random() < 0.1:
        case = replace(case, regex=rng.choice(REGEXES), max_tokens=40)
    return case


def cases(count: int, seed: int, folder: Path, model: Path) -> list[Case]:
    """`count` different cases, and what `model` answers: the bundled one, or some of its layers. folder: for
    the reference's socket."""
    rng, made = random.Random(seed), {}
    while len(made) < count:
        case = drawn(rng)
        made[case] = case
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    core = start_core(
        model,
        max_num_seqs=1,
        max_seq_len=2048,
        max_num_tokens=2048,
        max_num_tokens_while_decoding=2048,
        enable_kv_cache_reuse=False,
        max_tokens_in_paged_kv_cache=4096,
    )
    answered = []
    with serve(core, folder) as client:
        for case in made:
            ids = tokenizer.encode(case.prompt).ids
            found = []
            for number in range(case.sequences):
                params = SamplingParams(
                    max_tokens=case.max_tokens,
                    end_id=core.spec.eos_token_ids[0],
                    temperature=case.temperature,
                    seed=case.seed + number,
                    top_k=case.top_k,
                    top_p=case.top_p,
                    repetition_penalty=case.repetition_penalty,
                    frequency_penalty=case.frequency_penalty,
                    grammar_type="regex" if case.regex else "",
                    grammar=case.regex,
                )
                one = client.submit(ids, params)
                client.wait([one])
                text = tokenizer.decode([*ids, *client.tokens[one]])[len(tokenizer.decode(ids)) :]
                found.append(Answer(text, FINISH_REASONS[client.code[one]]))
            answered.append(_with_stop(replace(case, answers=tuple(found)), rng))
        assert not client.failure, client.failure
    return answered


def _with_stop(case: Case, rng: random.Random) -> Case:
    """Now and then with a stop word that is in the first answer. A chat ends at the checkpoint's, which
    clients of the ensemble have to send."""
    text, stop = case.answers[0].text, ENDS_CHATS if case.question else ""
    if not stop and len(text) >= 20 and not case.regex and rng.random() >= 0.8:
        at = rng.randrange(4, len(text) - 6)
        stop = text[at : at + rng.choice([1, 3, 6])]
    if not stop:
        return case
    cut = [Answer(a.text[: a.text.index(stop)], "stop") if stop in a.text else a for a in case.answers]
    return replace(case, stop=stop, answers=tuple(cut))
