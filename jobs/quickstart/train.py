"""Trains the quickstart's tokenizer and model on text from `make_data.py`.

The model is a small Llama with a byte-level BPE tokenizer. It learns in two stages. In the first
steps, most rows have only the first sentence of their instruction, which saves time; in these
steps, the model learns to look up and copy values. In later steps, rows have their whole
instruction, as in the quickstart job.

    torchrun --nproc-per-node 2 jobs/quickstart/train.py        # writes jobs/quickstart/model/

It also runs in one process, with half the rows per step: `python jobs/quickstart/train.py`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from make_data import INSTRUCTIONS, TASKS, Row, copying_row, make_row, training_rows
from office_values import Values
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
PAD, BOS, IM_START, IM_END = SPECIALS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")

# A space belongs to the token of the lower-case word after it, but not to the token of a
# capitalized word or a number after it. So names and numbers have the same tokens after a space and
# after a quotation mark, and are easy to copy. Numbers are split into pairs of digits: single
# digits occur so often in a document that the preceding digit does not determine the next.
WORDS = r" ?\p{Ll}+|\p{Lu}+\p{Ll}*|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+|."

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

IGNORED = -100


def build_tokenizer(rows: list[Row], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rows and instructions, and add the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for row in rows for text in (row.document, row.answer)]
    chat = [f"{role}\n" for role in ("system", "user", "assistant")]
    tokenizer.train_from_iterator([*texts, *(list(INSTRUCTIONS.values()) + chat) * 200], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B:1",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create a Llama with random weights and the tokenizer's special tokens."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=args.mlp_width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    start_as_copier(model)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


@torch.no_grad()
def start_as_copier(model: LlamaForCausalLM) -> None:
    """Initialize weights such that the model soon learns to look up and copy.

    Queries start equal to keys, so that tokens attend to similar tokens. The output projection
    starts as the transpose of the value projection, so that it passes attended values on.
    """
    config = model.config
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(std=weight.shape[1] ** -0.5)
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        split = (config.num_key_value_heads, config.head_dim, config.hidden_size)
        for source, target in (
            (attention.k_proj.weight, attention.q_proj.weight),
            (attention.v_proj.weight, attention.o_proj.weight.T),
        ):
            heads = source.view(split).repeat_interleave(groups, 0)
            target.copy_(heads.reshape(target.shape))
        attention.o_proj.weight.mul_(0.5 / groups)
        layer.mlp.down_proj.weight.mul_((2 * config.num_hidden_layers) ** -0.5)


@dataclass(frozen=True)
class Example:
    """A tokenized row: `ids[document:answer]` is the user's turn, `ids[answer:]` the answer."""

    task: str
    ids: list[int]
    document: int
    answer: int


class Encoder:
    """Tokenizes rows; encodes each different system turn only once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._long = {task: self._system(text) for task, text in INSTRUCTIONS.items()}
        self._short = {
            task: self._system(text[: text.index(". ") + 1]) for task, text in INSTRUCTIONS.items()
        } | {"copy": self._system("Copy the text.")}

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _system(self, text: str) -> list[int]:
        return self._encode(f"{BOS}{IM_START}system\n{text}{IM_END}\n{IM_START}user\n")

    def encode(self, row: Row, whole: bool) -> Example:
        """Tokenize a row, with its whole instruction if ``whole``, else only the first sentence."""
        system = (self._long if whole else self._short)[row.task]
        document = self._encode(f"{row.document}{IM_END}\n{IM_START}assistant\n")
        answer = self._encode(f"{row.answer}{IM_END}")
        start = len(system)
        ids = [*system, *document, *answer]
        return Example(row.task, ids, start, start + len(document))


@dataclass(frozen=True)
class Batch:
    """Right-padded rows, and the next token for each position."""

    ids: torch.Tensor  # [rows, length]
    answers: torch.Tensor  # [rows, length], IGNORED outside the answer
    documents: torch.Tensor  # [rows, length], IGNORED outside the document
    tasks: list[str]


def collate(examples: list[Example], pad: int) -> Batch:
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), pad)
    answers = torch.full_like(ids, IGNORED)
    documents = torch.full_like(ids, IGNORED)
    for index, example in enumerate(examples):
        row = torch.tensor(example.ids)
        ids[index, : len(row)] = row
        answers[index, example.answer - 1 : len(row) - 1] = row[example.answer :]
        documents[index, example.document : example.answer - 1] = row[
            example.document + 1 : example.answer
        ]
    return Batch(ids, answers, documents, [example.task for example in examples])


def batches(examples: list[Example], max_tokens: int, pad: int) -> list[Batch]:
    """Group rows of similar length, so that batches have little padding."""
    result: list[Batch] = []
    group: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.ids)):
        if group and (len(group) + 1) * len(example.ids) > max_tokens:
            result.append(collate(group, pad))
            group = []
        group.append(example)
    return [*result, collate(group, pad)]


def training_batches(
    args: argparse.Namespace, encoder: Encoder, pad: int, step: int
) -> Iterator[Batch]:
    """Yield one batch per step: exercises, then short instructions, then whole instructions."""
    seed = args.seed + 1_000 * rank() + 10_000 * step
    rows, values = training_rows(seed), Values(seed, "train")
    while True:
        whole = args.whole_early if step < args.short_steps else 1.0
        copying = 0.4 * max(0.0, 1 - step / args.copy_steps)
        examples = [
            encoder.encode(copying_row(values), False)
            if values.rng.random() < copying
            else encoder.encode(next(rows), values.rng.random() < whole)
            for _ in range(256)
        ]
        group = batches(examples, args.batch_tokens, pad)[:-1]  # the last batch is not full
        values.rng.shuffle(group)
        yield from group
        step += len(group)


def loss_of(model: LlamaForCausalLM, batch: Batch, document_weight: float) -> torch.Tensor:
    """Return the mean loss over answers, plus a small share of the loss over documents.

    The documents repeat some of their own values, which helps the model to learn copying early.
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state

    def mean(targets: torch.Tensor) -> torch.Tensor:
        wanted = targets != IGNORED
        logits = model.lm_head(hidden[wanted]).float()
        return torch.nn.functional.cross_entropy(logits, targets[wanted])

    loss = mean(batch.answers)
    return loss + document_weight * mean(batch.documents) if document_weight else loss


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, batch_list: list[Batch]) -> dict[str, float]:
    """Return the share of rows with a correct greedy answer, per task.

    Greedy decoding returns the answer if each of its tokens is the most likely one after the
    previous tokens. So one forward pass over the complete row is enough.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    for batch in batch_list:
        best = model(input_ids=batch.ids, use_cache=False).logits.argmax(-1)
        good = ((best == batch.answers) | (batch.answers == IGNORED)).all(-1).tolist()
        for task, is_right in zip(batch.tasks, good, strict=True):
            right[task].append(is_right)
    return {task: sum(right[task]) / len(right[task]) for task in TASKS}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the factor of the learning rate: linear warm-up, plateau, and a linear decay that
    starts at step `decay_from`."""
    if step < args.decay_from:
        share = min(1.0, (step + 1) / args.warmup)
    else:
        share = 1 - (step - args.decay_from) / (args.steps - args.decay_from)
    return float(args.lr * share)


def rank() -> int:
    """Return this process's rank in torchrun; 0 without torchrun."""
    return int(dist.get_rank()) if dist.is_initialized() else 0


def share_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Average the gradients over all processes in one all-reduce."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = torch.split(flat, [g.numel() for g in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write the weights in 16 bits, the configs and the tokenizer."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.save_pretrained(path)
    tokenizer.save_pretrained(path)


def train(args: argparse.Namespace) -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer(
        list(islice(training_rows(args.seed), 8_000)), args.vocab_size, args.max_length
    )
    encoder, pad = Encoder(tokenizer), tokenizer.pad_token_id
    model = build_model(args, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    held_out = Values(args.seed, "prompts")
    checks = [make_row(held_out, TASKS[i % len(TASKS)]) for i in range(args.check_rows)]
    check_batches = batches([encoder.encode(row, True) for row in checks], args.batch_tokens, pad)

    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    first = load_state(args.state, model, optimizer) if args.state else 0
    source, started, losses = training_batches(args, encoder, pad, first), time.monotonic(), 0.0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        weight = args.document_weight if step < args.copy_steps else 0.0
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, next(source), weight)
        torch.autograd.backward(loss)
        share_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += loss.item()
        if rank():
            continue
        if (step + 1) % args.log_every == 0:
            seconds = time.monotonic() - started
            print(f"{step + 1} {seconds:.0f}s loss {losses / args.log_every:.4f}", flush=True)
            losses = 0.0
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            score = exact_match(model, check_batches)
            total = sum(score.values()) / len(score)
            parts = " ".join(f"{task} {value:.3f}" for task, value in score.items())
            print(f"{step + 1} held out {total:.3f}: {parts}", flush=True)
            save(model, tokenizer, args.output)
            if args.state:
                state = (step + 1, model.state_dict(), optimizer.state_dict())
                torch.save(state, args.state)


def load_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Load the training state from a file, and return the next step."""
    if not path.exists():
        return 0
    step, weights, moments = torch.load(path)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return int(step)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train the quickstart's tokenizer and model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--output", type=Path, default=HERE / "model")
    option("--state", type=Path, help="file to store the training state in and resume from")
    option("--seed", type=int, default=1)
    option("--threads", type=int, default=1, help="per process")
    option("--vocab-size", type=int, default=1408)
    option("--max-length", type=int, default=1024)
    option("--width", type=int, default=192)
    option("--mlp-width", type=int, default=384)
    option("--layers", type=int, default=4)
    option("--heads", type=int, default=6)
    option("--kv-heads", type=int, default=3)
    option("--steps", type=int, default=3_000)
    option("--copy-steps", type=int, default=1_000, help="steps until the copying exercises end")
    option("--short-steps", type=int, default=1_300, help="steps with short instructions")
    option("--whole-early", type=float, default=0.1, help="share of whole instructions before that")
    option("--decay-from", type=int, default=1_500, help="step from which the learning rate decays")
    option("--batch-tokens", type=int, default=2_560, help="per process")
    option("--lr", type=float, default=1.5e-3)
    option("--warmup", type=int, default=100)
    option("--document-weight", type=float, default=0.1)
    option("--check-rows", type=int, default=256)
    option("--log-every", type=int, default=50)
    option("--save-every", type=int, default=250)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_args())
