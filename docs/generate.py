"""Makes the parts of docs/ that come from the code: algorithms.md from the registry."""

from __future__ import annotations

from pathlib import Path

from zeroone import _core

HEADER = """# Algorithms

Made by `make docs` from `src/algorithms/registry.cc`.

| algorithm | paper | schedule | preconditioner | code and feedback | collective |
|---|---|---|---|---|---|
"""


def algorithms() -> str:
    """The table of all named algorithms."""
    rows = [
        f"| `{name}` | arXiv {paper} | " + " | ".join(rest) + " |\n"
        for name, paper, *rest in _core.algorithms()
    ]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    (Path(__file__).parent / "algorithms.md").write_text(algorithms())
