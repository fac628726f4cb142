"""Small tokenizers, trained here: a byte-level one with ChatML tokens, and a SentencePiece one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from batchinfer.text.tokenizer import Tokenizer

SENTENCES = [
    "Summarize the ticket: the invoice of 12 March was paid twice, please refund 40 euros.",
    "You are a helpful assistant. Answer in one word, without punctuation.",
    "The quick brown fox jumps over the lazy dog; naïve café, Zürich, 東京, 🙂 smile.",
    "user system assistant tool hello hello world world stop stopping stopped",
] * 5
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ message['content'] | trim }} [/INST]{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)


def _byte_level() -> Any:
    """Return a tokenizer like GPT-2's; ``<think>`` is an added token, but not a special one."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def _sentencepiece() -> Any:
    """Return a tokenizer like those of Llama 2 and Mistral: metaspace, BOS and byte fallback."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=control + [f"<0x{value:02X}>" for value in range(256)],
        limit_alphabet=50,
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    serialized = json.loads(backend.to_str())
    serialized["added_tokens"] = [t for t in serialized["added_tokens"] if t["content"] in control]
    backend = Backend.from_str(json.dumps(serialized))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["[INST]", "[/INST]"],
        chat_template=INSTRUCT,
    )


def wrap(reference: Any, *, chat_template: str | None = None) -> Tokenizer:
    """Make our tokenizer from a tokenizer of transformers, as the loader does."""
    backend = reference.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    return Tokenizer(
        backend,
        chat_template=chat_template,
        special_tokens={
            name: text
            for name, text in reference.special_tokens_map.items()
            if isinstance(text, str)
        },
        control_tokens=frozenset(token.content for token in added if token.special),
        clean_up_tokenization_spaces=reference.clean_up_tokenization_spaces,
    )


@pytest.fixture(scope="session", params=[_byte_level, _sentencepiece])
def reference(request: pytest.FixtureRequest) -> Any:
    """Return transformers' tokenizers: byte-level and SentencePiece-like."""
    return request.param()


@pytest.fixture(scope="session")
def tokenizer(reference: Any) -> Tokenizer:
    """Return our tokenizer with the same backend and chat template."""
    return wrap(reference, chat_template=reference.chat_template)


@pytest.fixture(scope="session")
def chatml_reference() -> Any:
    """Return transformers' byte-level tokenizer with a ChatML template."""
    return _byte_level()


@pytest.fixture(scope="session")
def chatml(chatml_reference: Any) -> Tokenizer:
    """Return our byte-level tokenizer with a ChatML template."""
    return wrap(chatml_reference, chat_template=CHATML)


@pytest.fixture(scope="session")
def chatml_without_template(chatml_reference: Any) -> Tokenizer:
    """Return our byte-level tokenizer without a chat template."""
    return wrap(chatml_reference)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Return our SentencePiece-like tokenizer, with BOS and an instruct template."""
    return wrap(_sentencepiece(), chat_template=INSTRUCT)
