"""Write the golden texts anew: ``python -m tests.golden.regenerate``; then read the difference."""

import json
from pathlib import Path

from planner.render import answer_text

HERE = Path(__file__).parent

if __name__ == "__main__":
    document = json.loads((HERE / "answer.json").read_text(encoding="utf-8"))
    for width in (80, 120):
        text = answer_text(document, width)
        (HERE / f"answer_{width}.txt").write_text(text, encoding="utf-8")
