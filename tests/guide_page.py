"""docs/guide.md as a script: its files written, its commands typed one after the other into one shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
ELSEWHERE = ("make", "source", "docker", "sudo", "cp ops/")  # need root, Docker or an installation; see test_guide
_BLOCK = re.compile(r"(?:^(Add to )?`([\w.]+\.toml)`:\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXPECTED = re.compile(r"#\s*ends with (\d)")
_HEREDOC = re.compile(r"<<'(\w+)'")
_SIMULATED = re.compile(r"simulate --port (\d+)")
_CHECK = """\
__code=$?
[ $__code -eq {expected} ] || echo "ended with $__code, not {expected}: "{command} >> "$GUIDE_OUT/failures"
"""
_WAIT = """\
for __i in $(seq 300); do (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && break; sleep 0.1; done
"""
_JOBS = """\
batchmill jobs --json > "$GUIDE_OUT/jobs"
unset BATCHMILL_BROKER_URL BATCHMILL_DATABASE_URL
batchmill jobs --json >> "$GUIDE_OUT/jobs"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of code. ``file`` is what a TOML block is written to, or added to."""

    language: str
    text: str
    file: str = ""
    adds: bool = False


def blocks(*languages: str) -> list[Block]:
    """The blocks of the page in its order."""
    found = [Block(language=m[3], text=m[4], file=m[2] or "", adds=m[1] is not None) for m in _BLOCK.finditer(GUIDE)]
    return [b for b in found if not languages or b.language in languages]


def commands(text: str) -> list[str]:
    """A block's commands, continued lines and here-documents kept together."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        whole = line
        while whole.endswith("\\"):
            whole += "\n" + next(lines)
        if (end := _HEREDOC.search(whole)) is not None:
            body = list(iter(lambda: next(lines), end[1]))
            whole = "\n".join([whole, *body, end[1]])
        if whole.strip():
            found.append(whole)
    return found


def is_typed_here(command: str) -> bool:
    return not command.startswith(ELSEWHERE)


def script() -> str:
    """Everything of the page up to its end, each block's output into a file of its own number."""
    return "".join(_piece(number, block) for number, block in enumerate(blocks())) + _JOBS


def _piece(number: int, block: Block) -> str:
    if block.language == "toml":
        return f"cat {'>>' if block.adds else '>'} {block.file} <<'GUIDE_END'\n{block.text}\nGUIDE_END\n"
    if block.language == "python":
        return f"cat > example.py <<'GUIDE_END'\n{block.text}\nGUIDE_END\n" + _kept(number, "python example.py")
    if block.language == "sh":
        return _kept(number, *(c for c in commands(block.text) if is_typed_here(c)))
    return ""


def _kept(number: int, *typed: str) -> str:
    body = "".join(_typed(command) for command in typed)
    return f'{{\n:\n{body}}} > "$GUIDE_OUT/{number}" 2>&1\n'


def _typed(command: str) -> str:
    expected = _EXPECTED.search(command)
    check = _CHECK.format(expected=expected[1] if expected else "0", command=shlex.quote(command))
    port = _SIMULATED.search(command)
    return f"{command}\n{check}{_WAIT.format(port=port[1]) if port else ''}"


def shown(lines: str, *, ids: frozenset[str] = frozenset()) -> Iterator[str]:
    """Lines of output without what differs from run to run: numbers, ids, folders, columns."""
    for line in lines.splitlines():
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        plain = re.sub(r"^password [\w-]{20} ", "password PASSWORD ", plain)  # it may begin and end with a dash
        plain = re.sub(r"/\S*/mill\b", "/mill", plain)
        plain = re.sub(r"\b[a-z0-9]{8}\b", lambda m: "ID" if m[0] in ids or _is_sample(m[0]) else m[0], plain)
        yield " ".join(re.sub(r"\d[\d.,:]*", "N", plain).split())


def _is_sample(word: str) -> bool:
    return bool(re.search(r"\d", word) and re.search(r"[a-z]", word))
