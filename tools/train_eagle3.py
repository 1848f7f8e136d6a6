# SPDX-License-Identifier: Apache-2.0
"""Trains an EAGLE-3 head (https://arxiv.org/abs/2503.01840) for a small Llama-like model.

The head learns what its target would say next along texts, and, as drafting does, along its own hidden states
for a few tokens ("training-time test"). By default it is the one of the bundled model, on the model's own
training texts. Another model's texts are a file, or chats that it samples itself, messages and answers. The
same seed on the same machine and library versions gives the same files.

For SmolLM2-135M-Instruct (make serve MODEL=smollm2 fetches it):

    python tools/train_eagle3.py --model .cache/SmolLM2-135M-Instruct --output .cache/smollm2-eagle3 \\
        --chats 128 --taken 2 15 27 --known 4096 --intermediate-size 1536 --rows 8 --steps 100 \\
        --learning-rate 2e-3 --dtype bfloat16 --threads 2
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from client.arguments import integer, positive

BUNDLED = Path(__file__).parents[1] / "backend_src/flashinfer_backend/bundled_model"
DECAY = 0.8  # of the loss, with each further token of a draft
CHATS = 64  # sampled side by side
CHAT_TOKENS = 256  # of each, without what the template puts before the first message


class Head(nn.Module):
    """A head of one layer. ids: int64 [known], the target's tokens that it knows, ascending."""

    def __init__(self, target: PreTrainedModel, taken: list[int], ids: Tensor, intermediate: int) -> None:
        super().__init__()
        config = target.config
        self.taken, self.eps = taken, config.rms_norm_eps
        self.hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.theta = config.rope_parameters["rope_theta"]
        self.register_buffer("ids", ids)
        self.embedding = target.get_input_embeddings().weight.detach().float()
        hidden, rows = self.hidden, (self.heads + 2 * self.kv_heads) * self.dim
        self.fc = nn.Linear(len(taken) * hidden, hidden, bias=False)
        self.qkv = nn.Linear(2 * hidden, rows, bias=False)
        self.o = nn.Linear(self.heads * self.dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.lm_head = nn.Linear(hidden, len(ids), bias=False)
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = nn.ParameterDict({name: torch.ones(hidden) for name in names})
        with torch.no_grad():  # the target's last words are a good beginning
            self.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
            self.norms["norm"].copy_(target.model.norm.weight)
            self.o.weight.mul_(0.1)
            self.down.weight.mul_(0.1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (self.hidden,), self.norms[name], self.eps)

    def rotate(self, x: Tensor, shift: int) -> Tensor:
        """x [B, heads, T, D], of which the one at t has position t + shift."""
        positions = torch.arange(x.shape[2]) + shift
        angles = torch.outer(positions.float(), self.theta ** (-torch.arange(0, self.dim, 2) / self.dim))
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, taken: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
        """Logits [B, T, known] of each of `count` drafts of the chains that start at every position.

        taken [B, T, layers * H]: the target's hidden states; tokens int64 [B, T + count]: the texts. The n-th
        draft of the chain from t on guesses token t + 2 + n from token t + 1 + n. It sees what the target had
        up to t, and behind that the chain's own.
        """
        batch, length, _ = taken.shape
        hidden, logits = self.fc(taken), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        for ahead in range(count):
            words = self.embedding[tokens[:, 1 + ahead : 1 + ahead + length]]
            both = torch.cat([self.norm(words, "input_layernorm"), self.norm(hidden, "hidden_norm")], -1)
            parts = self.qkv(both).view(batch, length, -1, self.dim).transpose(1, 2)
            q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), 1)
            groups = self.heads // self.kv_heads
            q = self.rotate(q, ahead)
            keys.append(self.rotate(k, ahead).repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            scores = (q @ keys[0].transpose(2, 3)).masked_fill(~causal, float("-inf"))
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
            weights = (torch.cat([scores, *own], -1) / self.dim**0.5).softmax(-1)
            attended = weights[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., length + index, None] * value
            hidden = hidden + self.o(attended.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norm(hidden, "post_attention_layernorm")).chunk(2, -1)
            hidden = hidden + self.down(F.silu(gate) * up)
            logits.append(self.lm_head(self.norm(hidden, "norm")))
        return logits


def bundled_texts(seed: int) -> Iterator[str]:
    sys.path.insert(0, str(Path(__file__).parent / "bundled_model"))
    import make_text

    chunk = 0
    while True:
        chunk += 1
        yield from make_text.documents(seed * 1_000_003 + chunk, 256)


@torch.no_grad()
def own_chats(target: PreTrainedModel, folder: Path, end: int, number: int) -> list[list[int]]:
    """`number` chats that the target samples behind the beginning that its template gives a user's message:
    the message at temperature 1, and what follows its end, the template's words among it, at 0.5."""
    message = [{"role": "user", "content": "MESSAGE"}]
    template = AutoTokenizer.from_pretrained(folder)
    before = template.apply_chat_template(message, tokenize=False).split("MESSAGE")[0]
    ids = template(before, add_special_tokens=False).input_ids
    chats: list[list[int]] = []
    while len(chats) < number:
        tokens, made, cache = torch.tensor([ids] * CHATS), [], None
        answers = torch.zeros(CHATS, 1, dtype=torch.bool)
        for _ in range(CHAT_TOKENS):
            output = target(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens = (output.logits[:, -1].float() * (1.0 + answers)).softmax(-1).multinomial(1)
            answers |= tokens == end
            made.append(tokens)
        chats += [ids + chat for chat in torch.cat(made, 1).tolist()]
        print(f"{len(chats)} chats", flush=True)
    return chats[:number]


def shuffled(texts: list[list[int]], seed: int) -> Iterator[list[int]]:
    """In another order each time."""
    generator, texts = random.Random(seed), list(texts)
    while True:
        generator.shuffle(texts)
        yield from texts


def packed(texts: Iterator[list[int]], end: int, length: int) -> Iterator[list[int]]:
    """Rows of `length` tokens: texts, each behind the last one's end."""
    row: list[int] = []
    for text in texts:
        row += [*text, end]
        while len(row) >= length:
            yield row[:length]
            row = row[length:]


@torch.no_grad()
def targets_of(target: PreTrainedModel, head: Head, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the head takes, [B, T, layers * H], and how likely the target finds each token that the head knows
    behind each position, [B, T, known]."""
    output = target(tokens, output_hidden_states=True, use_cache=False)
    taken = torch.cat([output.hidden_states[after] for after in head.taken], -1).float()
    return taken, output.logits.float().softmax(-1)[..., head.ids]


def known_tokens(target: PreTrainedModel, rows: Iterator[list[int]], count: int, number: int) -> Tensor:
    """The `count` tokens that are most frequent in `number` rows."""
    found = torch.zeros(target.config.vocab_size, dtype=torch.int64)
    for _ in range(number):
        found += torch.bincount(torch.tensor(next(rows)), minlength=len(found))
    return found.argsort(descending=True, stable=True)[:count].sort().values


def train(target: PreTrainedModel, head: Head, rows: Iterator[list[int]], args: argparse.Namespace) -> None:
    matrices = [p for p in head.parameters() if p.dim() == 2]
    others = [p for p in head.parameters() if p.dim() < 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.learning_rate, weight_decay=0.0),
    ]
    began, length = time.monotonic(), args.length
    for step in range(args.steps):
        tokens = torch.tensor([next(rows) for _ in range(args.rows)])
        taken, wanted = targets_of(target, head, tokens)
        own = length - args.drafts
        loss = torch.zeros(())
        agreed = []
        with torch.autocast("cpu", target.dtype, enabled=target.dtype != torch.float32):
            drafts = head(taken[:, :own], tokens, args.drafts)
        for ahead, logits in enumerate(drafts):
            goal = wanted[:, 1 + ahead : 1 + ahead + own]
            loss = loss - DECAY**ahead * (goal * logits.float().log_softmax(-1)).sum(-1).mean()
            if step % 25 == 0 or step == args.steps - 1:
                agreed.append((goal.argmax(-1) == logits.argmax(-1)).float().mean().item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        warm, cosine = (step + 1) / 20, 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.learning_rate * min(warm, 0.02 + 0.98 * cosine)
            optimizer.step()
        head.zero_grad()
        if step % 25 == 0 or step == args.steps - 1:
            shares = " ".join(f"{share:.2f}" for share in agreed)
            seconds = time.monotonic() - began
            print(
                f"step {step} loss {loss.item():.3f}, drafts that agree {shares}, {seconds:.0f} s", flush=True
            )


def save(head: Head, target: PreTrainedModel, folder: Path) -> None:
    """bfloat16 weights by SafeAILab's names, and config.json."""
    names = {"fc": head.fc, "lm_head": head.lm_head, "midlayer.self_attn.o_proj": head.o}
    names["midlayer.mlp.down_proj"] = head.down
    tensors = {f"{name}.weight": module.weight for name, module in names.items()}
    rows = head.heads * head.dim, head.kv_heads * head.dim, head.kv_heads * head.dim
    for name, part in zip("qkv", head.qkv.weight.split(rows), strict=True):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = part
    for name, part in zip(("gate", "up"), head.gate_up.weight.chunk(2), strict=True):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = part
    for name, weight in head.norms.items():
        tensors[f"{name if name == 'norm' else f'midlayer.{name}'}.weight"] = weight
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    vocab = target.config.vocab_size
    stored["d2t"] = head.ids - torch.arange(len(head.ids))
    stored["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, head.ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.hidden,
        "intermediate_size": head.gate_up.out_features // 2,
        "num_hidden_layers": 1,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.eps,
        "rope_theta": head.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.config.max_position_embeddings,
        "vocab_size": vocab,
        "draft_vocab_size": len(head.ids),
        "eagle_aux_hidden_state_layer_ids": head.taken,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=BUNDLED, help="the target's folder")
    parser.add_argument("--output", type=Path, default=BUNDLED / "eagle3")
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--texts", type=Path, help="a file of paragraphs; default: the bundled model's texts")
    texts.add_argument("--chats", type=integer(1), help="chats that the target samples in place of texts")
    parser.add_argument("--taken", type=integer(1), nargs="+", default=[1, 2, 3], metavar="LAYERS",
                        help="after how many layers hidden states are taken")  # fmt: skip
    parser.add_argument("--known", type=integer(1), default=1024, help="tokens that the head knows")
    parser.add_argument("--intermediate-size", type=integer(1), default=256)
    parser.add_argument("--drafts", type=integer(1), default=2, help="tokens of a draft in training")
    parser.add_argument("--steps", type=integer(1), default=400)
    parser.add_argument("--rows", type=integer(1), default=4, help="rows of a step")
    parser.add_argument("--length", type=integer(8), default=256, help="tokens of a row")
    parser.add_argument("--learning-rate", type=positive, default=5e-3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32",
                        help="which the target computes in, and products of the head")  # fmt: skip
    parser.add_argument("--seed", type=integer(0), default=7)
    parser.add_argument("--threads", type=integer(1), default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    end = target.generation_config.eos_token_id
    if args.chats:
        documents = shuffled(own_chats(target, args.model, end, args.chats), args.seed)
    elif args.texts:
        texts = [text for text in args.texts.read_text(encoding="utf-8").split("\n\n") if text.strip()]
        documents = shuffled([tokenizer.encode(text).ids for text in texts], args.seed)
    else:
        documents = (tokenizer.encode(text).ids for text in bundled_texts(args.seed))
    rows = packed(documents, end, args.length)
    ids = known_tokens(target, rows, args.known, 200)
    head = Head(target, args.taken, ids, args.intermediate_size)
    train(target, head, rows, args)
    save(head, target, args.output)


if __name__ == "__main__":
    main()
