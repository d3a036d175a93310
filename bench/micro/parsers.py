"""What reading a model's output costs for each token.

``python bench/micro/parsers.py [--formats NAME,...] [--tokens 4000] [--out FILE]``

Tokens are pieces of four characters; a parser is fed one at a time, as streams are. Figures are processor time of this
thread, the smallest of several runs.

- ``answer_us``, ``reasoning_us``, ``call_us``: microseconds for each token of a long answer, of long reasoning, and of
  a call with one long argument
- ``call_long_us``: the same for an argument eight times as long (equal: the work grows with the length only)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.serving.parsers import OutputFormat, ToolCallEnded
from freetoken.serving.parsers.select import FORMATS
from freetoken.testing.model_outputs import TOOLS, whole_output

LINE = 'The value is call("x", [1, 2]) if a < b, else c; see notes.md # größe 東京\n'
TOKEN_CHARACTERS = 4
RUNS = 5


def us_per_token(format: OutputFormat, tail: str, text: str, calls: int) -> float:
    """Microseconds of processor time for each piece of ``text``."""
    pieces = [text[i : i + TOKEN_CHARACTERS] for i in range(0, len(text), TOKEN_CHARACTERS)]
    best = float("inf")
    for _ in range(RUNS):
        started = time.thread_time()
        parser = format.open(TOOLS, tail)
        events = [parser.feed(piece) for piece in pieces]
        events.append(parser.finish("stop"))
        best = min(best, time.thread_time() - started)
        found = sum(isinstance(event, ToolCallEnded) for part in events for event in part)
        if found != calls:
            raise RuntimeError(f"{format.name}: {found} calls read, {calls} written")
    return round(best / len(pieces) * 1e6, 2)


def measure(format: OutputFormat, tokens: int) -> dict[str, float]:
    """The figures of one format."""
    long = LINE * (tokens * TOKEN_CHARACTERS // len(LINE))

    def call(content: str) -> float:
        tail, text = whole_output(format, "", "", (("write_file", {"path": "a", "content": content}),))
        return us_per_token(format, tail, text, 1)

    figures = {"answer_us": us_per_token(format, *whole_output(format, "", long), 0)}
    if format.reasoning or format.channels:
        figures["reasoning_us"] = us_per_token(format, *whole_output(format, long, "Done."), 0)
    return {**figures, "call_us": call(long), "call_long_us": call(long * 8)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="", help="names, all by default")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    chosen = [format for format in FORMATS if not arguments.formats or format.name in arguments.formats.split(",")]
    figures = {format.name: measure(format, arguments.tokens) for format in chosen}
    write_result(arguments.out, "parsers", figures)


if __name__ == "__main__":
    main()
