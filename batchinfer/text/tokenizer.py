"""Encodes and decodes texts, with the same results as transformers' tokenizer."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from batchinfer.errors import RowError, one_line
from batchinfer.text.control_tokens import ControlTokens

TokenIds = npt.NDArray[np.int32]
_Text = TypeVar("_Text", str, tuple[str, str])

_MAX_CHARS_PER_CALL = 2**22
"""Maximum number of characters per call to the backend, which needs about 200 bytes per
character."""
_WORD_PIECE_SPACES = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


class Tokenizer:
    """A model's tokenizer. Thread-safe: the backend is a private copy that never changes."""

    def __init__(
        self,
        backend: Backend,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        control_tokens: frozenset[str],
        clean_up_tokenization_spaces: bool = False,
        has_token_type_ids: bool = True,
    ) -> None:
        """Wrap a copy of ``backend``.

        Args:
            backend: transformers' ``tokenizer.backend_tokenizer``.
            chat_template: transformers' ``tokenizer.chat_template``; the default template if there
                are several.
            special_tokens: transformers' ``tokenizer.special_tokens_map``; templates may use them.
            control_tokens: texts of the added tokens that steer the model. A row's text never
                becomes a control token, unless the job parses special tokens.
            clean_up_tokenization_spaces: transformers' setting, which has no effect on BPE.
            has_token_type_ids: True if transformers' ``tokenizer.model_input_names`` has
                ``token_type_ids``; otherwise all tokens of a pair count as tokens of the first
                text.
        """
        self._backend = _private_copy(backend.to_str())
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        self.control = ControlTokens(control_tokens)
        is_bpe = isinstance(backend.model, BPE)
        self._cleans_up_spaces = clean_up_tokenization_spaces and not is_bpe
        self._has_token_type_ids = has_token_type_ids
        self._secret_of = {
            token: f"control{secrets.token_hex(16)}x{index}x"
            for index, token in enumerate(sorted(self.control.tokens))
        }

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, including added tokens."""
        added = self._backend.get_added_tokens_decoder()
        return max(
            self._backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1
        )

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` omits from the text."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)

    @functools.cached_property
    def num_added_special_tokens(self) -> int:
        """Number of tokens that ``add_special_tokens`` adds to a text."""
        return int(self._backend.num_special_tokens_to_add(False))

    @functools.cached_property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @functools.cached_property
    def prefix_token_id(self) -> int | None:
        """Id of the token to put before a text so that its first token can be scored: BOS, or else
        EOS."""
        bos = self.bos_token_id
        return self._special_id("eos_token") if bos is None else bos

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    @functools.cached_property
    def has_byte_fallback(self) -> bool:
        """True if the decoder joins runs of ``<0xNN>`` tokens, as SentencePiece does."""
        if self._backend.decoder is None:
            return False
        decoder = json.loads(self._backend.decoder.__getstate__())
        parts = decoder.get("decoders", [decoder])
        return any(part.get("type") == "ByteFallback" for part in parts)

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token, special or not, with this text, or None."""
        return self._added_ids.get(text)

    def single_token_id(self, text: str) -> int | None:
        """Return the id of ``text`` if it is exactly one token, else None."""
        (ids,) = self.encode_batch([text], add_special_tokens=False, parse_special_tokens=True)
        return int(ids[0]) if len(ids) == 1 else None

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items()}

    @property
    def serialized(self) -> str:
        """The tokenizer's backend as the JSON text of a ``tokenizer.json`` file."""
        text: str = self._backend.to_str()
        return text

    def token(self, token_id: int) -> str | None:
        """Return the token's text in the vocabulary; None for an id without a token."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> list[TokenIds]:
        """Return the token ids of each text, int32.

        Args:
            texts: valid Unicode (no lone surrogates).
            add_special_tokens: add BOS and other tokens, as ``tokenizer(text)`` does.
            parse_special_tokens: True to parse the texts of control tokens, which otherwise stay
                plain text.
        """
        return _encode(self._parsing(parse_special_tokens), texts, add_special_tokens)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, parse_special_tokens: bool
    ) -> list[tuple[TokenIds, int]]:
        """Return the token ids of each pair, joined as ``tokenizer(first, second)`` does, and the
        number of ids of the first text. The arguments are the same as in ``encode_batch``."""
        return self._encode_pairs(self._parsing(parse_special_tokens), pairs)

    def cut_pair(
        self, pair: tuple[str, str], max_tokens: int, *, parse_special_tokens: bool
    ) -> tuple[TokenIds, int]:
        """Encode a pair, truncated to ``max_tokens`` ids like transformers' ``longest_first``."""
        cutting = _private_copy(self._parsing(parse_special_tokens).to_str())
        cutting.enable_truncation(max_tokens, strategy="longest_first")
        return self._encode_pairs(cutting, [pair])[0]

    def _parsing(self, parse_special_tokens: bool) -> Backend:
        return self._backend if parse_special_tokens else self._plain_backend

    def _encode_pairs(
        self, backend: Backend, pairs: Sequence[tuple[str, str]]
    ) -> list[tuple[TokenIds, int]]:
        return [
            (
                np.array(encoding.ids, dtype=np.int32),
                len(encoding.ids) - self._has_token_type_ids * sum(encoding.type_ids),
            )
            for group in _groups(pairs)
            for encoding in backend.encode_batch_fast(group, add_special_tokens=True)
        ]

    def encode_marked(
        self,
        texts: Sequence[str],
        restore: Sequence[Callable[[str], str]],
        *,
        add_special_tokens: bool,
    ) -> list[TokenIds]:
        """Return the token ids of rendered texts, in which marks stand for plain text.

        Args:
            texts: rendered texts, with marks in place of the rows' own control-token texts.
            restore: for each text, the function that replaces its marks with the rows' own texts,
                which stay plain text.
        """
        disguised = [
            put_back(self.control.pattern.sub(lambda match: self._secret_of[match[0]], text))
            for text, put_back in zip(texts, restore, strict=True)
        ]
        return _encode(self._plain_backend, disguised, add_special_tokens)

    def num_control_ids(self, token_ids: TokenIds) -> int:
        known = token_ids[token_ids < len(self._is_control)]
        return int(np.count_nonzero(self._is_control[known]))

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool) -> str:
        """Return the text of ``token_ids``, like transformers' ``tokenizer.decode``.

        Raises:
            RowError: ``tokenizer_error``: the decoder fails.
        """
        try:
            text = self._backend.decode(
                _as_list(token_ids), skip_special_tokens=skip_special_tokens
            )
        except BaseException as error:
            # PanicException is raised by Rust code and is not an Exception.
            if type(error).__name__ != "PanicException":
                raise
            failed = f"the tokenizer failed to decode the output: {one_line(error)}"
            raise RowError("tokenizer_error", failed) from None
        return self._clean_up(text)

    def decode_batch(
        self, sequences: Sequence[Sequence[int] | TokenIds], *, skip_special_tokens: bool
    ) -> list[str]:
        lists = [_as_list(token_ids) for token_ids in sequences]
        texts = self._backend.decode_batch(lists, skip_special_tokens=skip_special_tokens)
        return [self._clean_up(text) for text in texts]

    def _clean_up(self, text: str) -> str:
        if self._cleans_up_spaces:
            for spaced, plain in _WORD_PIECE_SPACES:
                text = text.replace(spaced, plain)
        return text

    @functools.cached_property
    def _is_control(self) -> npt.NDArray[np.bool_]:
        """Bool [vocab_size]: True for control tokens, except the unknown token, which stands for
        any character that the tokenizer does not know."""
        ids = [self._backend.token_to_id(token) for token in self.control.tokens]
        is_control = np.zeros(self.vocab_size, dtype=np.bool_)
        is_control[[id_ for id_ in ids if id_ is not None]] = True
        unknown = self._backend.token_to_id(self.special_tokens.get("unk_token", ""))
        if unknown is not None:
            is_control[unknown] = False
        return is_control

    @functools.cached_property
    def _plain_backend(self) -> Backend:
        """Copy of the backend in which control tokens keep their ids, but have secret texts.

        Text therefore never becomes a control token, however the tokenizer finds tokens (added
        tokens, normalized text, whole words, merges). ``encode_marked`` writes a template's own
        control tokens as their secret texts.
        """
        return _private_copy(
            json.dumps(_renamed(json.loads(self._backend.to_str()), self._secret_of))
        )


def no_tokenizer() -> Tokenizer:
    """Return a tokenizer without tokens, which decodes any ids to an empty text."""
    return Tokenizer(
        Backend(BPE()), chat_template=None, special_tokens={}, control_tokens=frozenset()
    )


def _private_copy(serialized: str) -> Backend:
    backend = Backend.from_str(serialized)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _as_list(token_ids: Sequence[int] | TokenIds) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)


def _encode(backend: Backend, texts: Sequence[_Text], add_special_tokens: bool) -> list[TokenIds]:
    encoded: list[TokenIds] = []
    for group in _groups(texts):
        encodings = backend.encode_batch_fast(group, add_special_tokens=add_special_tokens)
        encoded += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
    return encoded


def _groups(texts: Sequence[_Text]) -> Iterator[list[_Text]]:
    """Split texts into groups of a limited number of characters; a longer text is its own group."""
    group: list[_Text] = []
    size = 0
    for text in texts:
        length = len(text) if isinstance(text, str) else sum(map(len, text))
        if group and size + length > _MAX_CHARS_PER_CALL:
            yield group
            group, size = [], 0
        group.append(text)
        size += length
    if group:
        yield group


def _renamed(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Replace the texts of some tokens everywhere in a serialized tokenizer."""
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): id_ for text, id_ in vocab.items()}
    else:  # Unigram: a list of pieces with scores, where the index is the id
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, names)]
    return tokenizer


def _touches(pair: str | list[str], names: Mapping[str, str]) -> bool:
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left in names or right in names or left + right in names
