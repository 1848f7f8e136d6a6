# SPDX-License-Identifier: Apache-2.0
"""Trains the bundled model: a byte-level BPE tokenizer and a small Llama, written as a Hugging Face folder.

With the defaults this is the recipe of the model in backend_src/flashinfer_backend/bundled_model; it takes
minutes on one CPU core. The same seed on the same machine and library versions gives the same files.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import make_text
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from client.arguments import integer, positive

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
IGNORED = -100  # label without a loss
MAX_POSITIONS = 2048
# Documents hold several questions, so the model goes on with the next one.
STOP_STRINGS = ["\nQuestion:"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}\nAnswer:"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
)
RECORDED_PROMPT = "The FlashInfer backend for Triton"
RECORDED_TOKENS = 32
SAMPLE_PROMPTS = [
    "Once upon a time", "FlashInfer backend for Triton", "Question: what colour is the sky?\nAnswer:",
    "Tell me a story about a fox.", "Hello, my name is", "What is machine learning?",
    "The word hello in many languages:", "The capital of France is",
]  # fmt: skip


def train_tokenizer(seed: int, documents: int, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, so that any UTF-8 text has ids; encoding prepends BOS.

    It never sees the fixed paragraphs: their words then fall into several tokens, and their characters beyond
    Latin into single bytes, as happens with rare text in a real model.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_text.documents(seed, documents, with_paragraphs=False), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def rows(tokenizer: Tokenizer, seed: int, length: int, reading: int = 1) -> Iterator[list[int]]:
    """Documents between BOS and EOS, packed into rows of at most `length` tokens.

    A row begins with a document and no document is continued in the next row, so that almost every name in it
    has been introduced in it; without this the model is slow to learn that a story keeps its names.
    """
    chunk = 0
    while True:
        chunk += 1
        packed: list[list[int]] = []
        texts = list(make_text.documents(seed * 1_000_003 + chunk, 256, reading=reading))
        for encoding in tokenizer.encode_batch(texts):
            ids = [*encoding.ids, EOS_ID][:length]
            for row in packed:
                if len(row) + len(ids) <= length:
                    row += ids
                    break
            else:
                packed.append(ids)
        yield from packed


def batch(source: Iterator[list[int]], size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, int64 [size, length], padded on the right with PAD and with the ignored label."""
    ids = torch.full((size, length), PAD_ID)
    labels = torch.full((size, length), IGNORED)
    for i, row in zip(range(size), source, strict=False):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.tensor(row)
    return ids, labels


def train_model(config: LlamaConfig, tokenizer: Tokenizer, args: argparse.Namespace) -> LlamaForCausalLM:
    """A float32 model after `args.steps` steps of Muon and AdamW with warm-up and a cosine schedule."""
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config)
    # Embeddings that begin long keep words apart that stand in the same places, such as names; begun short,
    # they grow alike and the model is slow to learn to repeat the right one.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.hidden_size**-0.5)
    layers = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not q for q in layers)]
    # Muon for the layers' matrices reaches in 150 steps a loss that AdamW alone has not reached in 300.
    optimizers = [
        torch.optim.Muon(layers, lr=args.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    warmup = max(1, min(60, args.steps // 10))
    # First mostly reading tasks, which teach to copy from the context. Later every eighth step has longer
    # rows, so that text stays sound past `length`.
    length, longer = args.length, 4 * args.length
    early_rows = rows(tokenizer, args.seed, length, reading=20)
    short_rows = rows(tokenizer, args.seed + 1, length)
    long_rows = rows(tokenizer, args.seed + 2, longer)
    start = time.monotonic()
    for step in range(args.steps):
        if step < args.steps // 4:
            ids, labels = batch(early_rows, max(1, args.tokens_per_step // length), length)
        elif step % 8:
            ids, labels = batch(short_rows, max(1, args.tokens_per_step // length), length)
        else:
            ids, labels = batch(long_rows, max(1, args.tokens_per_step // longer), longer)
        cosine = 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.learning_rate * min((step + 1) / warmup, 0.02 + 0.98 * cosine)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if step % 25 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.3f} after {time.monotonic() - start:.0f} s", flush=True)
    return model.eval()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder: bfloat16 weights (lm_head is tied and left out), plain config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    c = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.hidden_act,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": c.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": c.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    generation |= {"stop_strings": STOP_STRINGS}
    for name, content in [
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ]:
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


class Folder:
    """A saved model, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.stop_strings = None  # of chats
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def continue_text(self, prompt: str, max_tokens: int, temperature: float) -> tuple[str, list[int]]:
        """Continuation of `prompt` and its ids; temperature 0 is greedy."""
        prompt_ids = torch.tensor([self.tokenizer.encode(prompt).ids])
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        output = self.model.generate(prompt_ids, max_new_tokens=max_tokens, **sampling)
        ids = output[0, prompt_ids.shape[1] :].tolist()
        return self.tokenizer.decode(ids), ids


def parse_args() -> argparse.Namespace:
    default_folder = Path(__file__).parents[2] / "backend_src/flashinfer_backend/bundled_model"
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=default_folder)
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--steps", type=integer(1), default=1700)
    parser.add_argument("--tokens-per-step", type=integer(1), default=2048)
    parser.add_argument("--length", type=integer(1), default=256, help="tokens of a training sequence")
    parser.add_argument("--learning-rate", type=positive, default=5e-3)
    parser.add_argument("--vocab-size", type=integer(1), default=2048)
    parser.add_argument("--tokenizer-documents", type=integer(1), default=30000)
    parser.add_argument("--hidden-size", type=integer(1), default=128)
    parser.add_argument("--intermediate-size", type=integer(1), default=384)
    parser.add_argument("--layers", type=integer(1), default=4)
    parser.add_argument("--threads", type=integer(1), default=1)
    parser.add_argument(
        "--sample-tokens", type=integer(1), default=120, help="length of the samples printed at the end"
    )
    parser.add_argument("--record", type=Path, help="write the greedy continuation of a fixed prompt here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer(args.seed, args.tokenizer_documents, args.vocab_size)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,  # the smallest that FlashInfer's kernels are built for
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    save(train_model(config, tokenizer, args), tokenizer, args.output)
    folder = Folder(args.output)
    if args.record:
        text, ids = folder.continue_text(RECORDED_PROMPT, RECORDED_TOKENS, 0.0)
        record = {"prompt": RECORDED_PROMPT, "max_tokens": RECORDED_TOKENS}
        record |= {"continuation": text, "token_ids": ids}
        args.record.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    for temperature in (0.0, 0.8):
        for prompt in SAMPLE_PROMPTS:
            text, _ = folder.continue_text(prompt, args.sample_tokens, temperature)
            print(f"[temperature {temperature}] {prompt!r} -> {text!r}")


if __name__ == "__main__":
    main()
