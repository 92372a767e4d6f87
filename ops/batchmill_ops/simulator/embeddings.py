"""One embedding request: its texts, tokens and vectors. Texts that share words get vectors that point the same way."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from .chat import count_tokens
from .error_bodies import BadRequest

DEFAULT_DIMENSIONS = 64
_MAX_DIMENSIONS = 4096
_MAX_INPUTS = 2048
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    texts: tuple[str, ...]
    dimensions: int
    as_base64: bool

    @property
    def input_tokens(self) -> int:
        return sum(max(1, count_tokens(text)) for text in self.texts)

    @property
    def longest_tokens(self) -> int:
        return max(count_tokens(text) for text in self.texts)


def parse_embeddings(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Reads the body of an embedding call; token ids stand for a text of their own. Raises BadRequest."""
    given = body.get("input")
    many: list[Any] = given if isinstance(given, list) and not all(isinstance(item, int) for item in given) else [given]
    if given in ("", []) or not all(isinstance(item, str | list) for item in many):
        raise BadRequest(
            "'input' must be a string, a list of strings or lists of token ids, and not empty.", param="input"
        )
    if len(many) > _MAX_INPUTS:
        raise BadRequest(f"'input' has {len(many)} texts; at most {_MAX_INPUTS} go into one call.", param="input")
    dimensions = body.get("dimensions", DEFAULT_DIMENSIONS)
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise BadRequest(f"'dimensions' must be an integer from 1 to {_MAX_DIMENSIONS}.", param="dimensions")
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise BadRequest("'encoding_format' must be float or base64.", param="encoding_format")
    texts = tuple(item if isinstance(item, str) else " ".join(map(str, item)) for item in many)
    return EmbeddingRequest(texts=texts, dimensions=dimensions, as_base64=encoding == "base64")


def embeddings(request: EmbeddingRequest) -> list[dict[str, Any]]:
    """The ``data`` list of the answer, one entry per text with its index."""
    return [
        {"object": "embedding", "index": index, "embedding": _encoded(text, request)}
        for index, text in enumerate(request.texts)
    ]


def vector(text: str, dimensions: int) -> bytes:
    """Unit vector of ``text`` as little-endian float32: hashed words, each with a sign (Weinberger et al. 2009)."""
    sums = [0.0] * dimensions
    for word in _WORDS.findall(text.lower()) or [text]:
        hashed = crc32(word.encode("utf-8"))
        sums[(hashed >> 1) % dimensions] += 1.0 if hashed & 1 else -1.0
    if not any(sums):
        sums[crc32(text.encode("utf-8")) % dimensions] = 1.0
    length = math.sqrt(math.fsum(x * x for x in sums))
    return struct.pack(f"<{dimensions}f", *(x / length for x in sums))


def _encoded(text: str, request: EmbeddingRequest) -> str | list[float]:
    packed = vector(text, request.dimensions)
    if request.as_base64:
        return base64.b64encode(packed).decode("ascii")
    return list(struct.unpack(f"<{request.dimensions}f", packed))
