"""Decodes text files, and makes the errors for bytes that are invalid in a file's encoding."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from batchinfer.console.format import format_value
from batchinfer.errors import DataError

MARK = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which some editors write at the beginning of a file."""
KEEP_BYTES = "batchinfer-keep-bytes"
"""An error handler for ``to_utf8``: invalid bytes stay in the result, which is then not UTF-8."""
_MARKS = {
    MARK: "utf-8",
    **{b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32"},
    **{b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"},
}
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "utf-32-le",
    (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le",
    (True, False, True, False): "utf-16-be",
}
"""Encodings of files, keyed by whether each of the first four bytes is zero. The mapping holds for
files that begin with ASCII characters (RFC 4627)."""
_CANDIDATES = ("cp1252", "mac_roman", "cp1250", "cp1251", "cp932", "gb18030")
"""Encodings to suggest, most common first."""
_ODD = re.compile(
    r"(?<=[^\W\d_])[\u2018\u201c\u201e]"  # an opening quote after a letter
    r"|(?<=[^\W\d_])[\u201d\xab\xbb\u2013\u2022\u2039\u20ac\xa3\xa7\xb0\xa9\xae\u2122](?=[^\W\d_])"
    r"|(?<=[^\x00-\x7f])[@\[\\\]^_`{|}~]"  # second bytes of letters in Japanese and Chinese files
    r"|[\uff61-\uff9f]"  # half-width katakana
)
"""Characters in positions where they are rare, such as a symbol between two letters."""
_AROUND = re.compile(rb"[^\x00-\x20\",;|]{0,40}")


@dataclass(frozen=True)
class BadCell:
    """A cell with bytes that are not valid in the file's encoding."""

    line: int
    """Number of the line with the first invalid byte, from 1."""
    column: str | None
    """Column of the cell; None if the record cannot be read, so that its columns are unknown."""
    text: bytes
    """The cell (CSV) or the whole line (JSON) in UTF-8, with the invalid bytes unchanged."""


def to_utf8(chunks: Iterable[bytes], encoding: str, errors: str) -> Iterator[bytes]:
    """Decode a file's chunks and encode them as UTF-8.

    Args:
        errors: ``strict``, ``replace`` or ``KEEP_BYTES``.

    Raises:
        UnicodeError: bytes are not valid in the encoding.
    """
    if encoding != "utf-8" or errors == "replace":
        for text in codecs.iterdecode(chunks, encoding, errors):
            yield text.encode("utf-8", "surrogateescape")
    elif errors == KEEP_BYTES:
        yield from chunks
    else:
        decoder = codecs.getincrementaldecoder(encoding)()
        for chunk in chunks:
            decoder.decode(chunk)
            yield chunk
        decoder.decode(b"", final=True)


def is_utf8(text: bytes) -> bool:
    return _error(text) is None


def lines_before_error(text: bytes) -> int:
    """Count the line ends (LF, CRLF or CR) before the first byte that is not valid UTF-8."""
    error = _error(text)
    return 0 if error is None else len((text[: error.start] + b".").splitlines()) - 1


def check_start(start: bytes, path: str, encoding: str) -> None:
    """Check that a file does not begin like a file in another encoding.

    Raises:
        DataError: the file begins with the byte-order mark of another encoding, or its encoding is
            UTF-8, but its first bytes have the zeros of UTF-16 or UTF-32.
    """
    if encoding.startswith(("utf-16", "utf-32")):
        return
    found = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    if found is None and encoding == "utf-8":
        found = _ZEROS.get(tuple(byte == 0 for byte in start[:4]))
    if found is not None and not encoding.startswith(found):
        raise DataError(
            f"{path} begins like a file in {found.upper()}, not in {encoding.upper()}",
            hint=f"set input.encoding: {found}",
        )


def wrong_encoding(path: str, encoding: str, cell: BadCell | None) -> DataError:
    """Make the error for a file that is not valid in its encoding.

    Args:
        cell: the first bad cell; None if no readable record holds the bad bytes.
    """
    go_on = "to read such bytes as U+FFFD, set input.encoding_errors: replace"
    name = encoding.upper()
    error = None if cell is None else _error(cell.text)
    if cell is None or error is None:
        return DataError(f"{path} is not valid {name}", hint=f"set input.encoding; {go_on}")
    column = "" if cell.column is None else f", column {format_value(cell.column)}"
    byte = cell.text[error.start]
    problem = f"{path}, line {cell.line}{column} is not valid {name} (byte 0x{byte:02x})"
    if encoding != "utf-8":
        return DataError(problem, hint=f"set input.encoding to the file's encoding; {go_on}")
    begin, end = _word(cell.text, error.start)
    best, reading = _best_reading(cell.text[begin:end])
    return DataError(
        problem,
        hint=f"in {best}, the word with this byte reads {format_value(reading)}; if that is right, "
        f"set input.encoding: {best} (init: --encoding {best}); if not, set another encoding; "
        f"{go_on}",
    )


def _error(text: bytes) -> UnicodeDecodeError | None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error
    return None


def _word(text: bytes, at: int) -> tuple[int, int]:
    """Return the beginning and the end of the word around a byte."""
    before = _AROUND.match(text[:at][::-1])
    after = _AROUND.match(text, at)
    return at - (before.end() if before else 0), after.end() if after else at + 1


def _best_reading(text: bytes) -> tuple[str, str]:
    """Return the candidate encoding whose decoded text looks most like words, and that text."""
    readings: dict[str, str] = {}
    for name in _CANDIDATES:
        try:
            readings[name] = text.decode(name)
        except UnicodeDecodeError:
            continue
    return min(readings.items(), key=lambda reading: _oddness(reading[1]))


def _oddness(text: str) -> int:
    """Count features that are rare in words: symbols, accented capitals after the first letter,
    neighboring letters from two scripts, and two accented Latin letters in a row."""
    odd = len(_ODD.findall(text))
    odd += sum(c > "\xff" and c != "€" and unicodedata.category(c)[0] in "SC" for c in text)
    for one, other in pairwise(text):
        if one.isalpha() and other.isalpha() and not (one.isascii() and other.isascii()):
            odd += other.isupper() and not other.isascii()
            odd += _script(one) != _script(other)
            odd += not one.isascii() and not other.isascii() and _script(one) == "LATIN"
    return odd


def _script(letter: str) -> str:
    """Return the first word of a letter's name, such as LATIN; kana and Han count as one script."""
    script = unicodedata.name(letter, "").partition(" ")[0]
    return "CJK" if script in ("HIRAGANA", "KATAKANA") else script


def _keep_bytes(error: UnicodeError) -> tuple[str, int]:
    """Replace each invalid byte with a surrogate, which ``to_utf8`` encodes as a single byte."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    bad = error.object[error.start : error.end]
    return "".join(chr(0xDC80 | byte) for byte in bad), error.end


codecs.register_error(KEEP_BYTES, _keep_bytes)
