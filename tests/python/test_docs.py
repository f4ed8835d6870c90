"""Every sample and command in README and docs runs; what is made from the code is up to date.

C++ samples are extracted, built and run by tests/cpp/CMakeLists.txt.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroone

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKED_ELSEWHERE = {"", "cpp", "cmake"}  # formulas; tests/cpp/CMakeLists.txt; tests/cpp/consumer


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The samples of a page: first line, text."""
    text = text_of(page)
    return [
        (text.count("\n", 0, block.start(2)) + 1, block[2])
        for block in BLOCK.finditer(text)
        if block[1] == language
    ]


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return page.name


def test_no_block_is_of_a_language_that_nothing_runs() -> None:
    found = {language for page in PAGES for language, _ in BLOCK.findall(text_of(page))}
    assert found <= CHECKED_ELSEWHERE | {"python", "bash"}


# In order and in one process; an error names page and line.
RUN = """
import sys, zeroone
namespace = {"__name__": "__main__"}
for where, text in %r:
    exec(compile(text, where, "exec"), namespace)
"""


@pytest.mark.parametrize("page", with_blocks("python"), ids=name_of)
def test_python_samples(page: Path, tmp_path: Path) -> None:
    """A sample whose first line names a torchrun command runs by it; all others run together."""
    together: list[tuple[str, str]] = []
    commands: list[tuple[bool, list[str]]] = []  # whether it prints something
    for line, text in blocks(page, "python"):
        where = f"{page.name}, line {line}"
        if torchrun := re.match(r"#.*torchrun (.*) \S+\.py\n", text):
            program = tmp_path / f"line {line}.py"
            program.write_text(text)
            launcher = [sys.executable, "-m", "torch.distributed.run"]
            arguments = [*torchrun[1].split(), str(program)]
            commands.append(("print(" in text, [*launcher, *arguments]))
        else:
            together.append((where, "\n" * (line - 1) + text))
    prints = any("print(" in text for _, text in together)
    commands.append((prints, [sys.executable, "-W", "error", "-c", RUN % together]))
    for prints, command in commands:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout or not prints


@pytest.mark.parametrize("page", with_blocks("bash"), ids=name_of)
def test_commands(page: Path) -> None:
    """`make X` names a target that make can plan; other commands are run as they are."""
    for first, text in blocks(page, "bash"):
        for line in text.splitlines():
            command = line.split("#")[0].strip()
            if command.startswith("make "):
                command = f"make --dry-run {command.removeprefix('make ')}"
            result = subprocess.run(
                command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300
            )
            assert result.returncode == 0, f"{first}: {line}\n{result.stdout}{result.stderr}"
            assert result.stdout, line


def test_commands_in_the_text_name_what_there_is() -> None:
    """Targets of make, and programs."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert "test" in targets
    for page in PAGES:
        for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text_of(page))):
            command, *words = span.split()
            if command == "make":
                assert set(words) <= targets, f"{page.name}: {span}"
            if command.endswith(("python", "torchrun")):
                for word in words:
                    assert not word.endswith(".py") or (ROOT / word).exists(), (
                        f"{page.name}: {span}"
                    )


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        prose = BLOCK.sub("", text_of(page))
        for target in re.findall(r"\]\(([^)]+)\)|^\[[^]]+\]: (\S+)$", prose, re.MULTILINE):
            link = "".join(target)
            if "://" not in link:
                assert (page.parent / link.split("#")[0]).exists(), f"{page.name}: {link}"


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:src|tests|docs|recipes|examples|benchmarks)/[\w./-]+)`", text_of(page)
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_table_of_algorithms_is_that_of_the_registry() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "algorithms.md").read_text() == generate.algorithms()


# --- the matrix of what works with what ----------------------------------------------------------

SUPPORT = ROOT / "docs" / "support.md"
CELL = re.compile(r"\[([\d, ]+)\]\[([\w-]+)\]")


def function(path: Path, name: str) -> ast.FunctionDef | None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def constant(path: Path, node: ast.expr) -> int | None:
    """The value of an integer, or of a name that the file gives to one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        found = re.search(rf"^{node.id} = (\d+)$", path.read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None


def parameters_of(test: ast.FunctionDef) -> dict[str, set[int]]:
    """The integers that parametrize, and Hypothesis' integers(first, last), give its arguments."""
    values: dict[str, set[int]] = {}
    for call in (node for node in test.decorator_list if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "pytest.mark.parametrize":
            names, rows = call.args
            columns = names.elts if isinstance(names, ast.Tuple) else [names]
            for row in rows.elts if isinstance(rows, ast.List) else []:
                cells = row.elts if isinstance(names, ast.Tuple) else [row]  # type: ignore[attr-defined]
                for column, cell in zip(columns, cells, strict=True):
                    if isinstance(cell, ast.Constant) and type(cell.value) is int:
                        values.setdefault(ast.literal_eval(column), set()).add(cell.value)
        for keyword in call.keywords:
            if found := re.fullmatch(r"st\.integers\((\d+), (\d+)\)", ast.unparse(keyword.value)):
                values[str(keyword.arg)] = set(range(int(found[1]), int(found[2]) + 1))
    return values


def ranks_of(path: Path, name: str) -> set[int]:
    """With how many ranks a test runs."""
    test = function(path, name)
    assert test is not None, f"{path} has no {name}"
    if path.name.startswith("every_rank_"):
        return ranks_of(path.parent / "test_torchrun.py", "test_every_rank")
    parameters = parameters_of(test)
    ranks: set[int] = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            first = called in ("World", "torchrun")  # threads; processes
            if first or called in ("run_ranks", "run_recipe"):
                number = node.args[0 if first else 1]
                value = constant(path, number)
                ranks |= parameters.get(ast.unparse(number), set()) | {value or 0}
    return ranks - {0} or {1}


def test_every_cell_of_the_matrix_has_its_tests() -> None:
    text = text_of(SUPPORT)
    targets = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
    tests = {
        name: ((SUPPORT.parent / path).resolve(), test)
        for name, (path, test) in ((name, target.split("#")) for name, target in targets.items())
    }
    numbers = {name: ranks_of(*test) for name, test in tests.items()}
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split("## ")[0].splitlines()
        if line.startswith("|")
    )
    assert header == ["feature", "ZeroOneAdam", "OneBitAdam", "AdamW"]
    cells = [(row[0], cell) for row in rows if not row[0].startswith("**") for cell in row[1:]]
    assert len(cells) > 100
    for feature, cell in cells:
        links = CELL.findall(cell)
        assert cell in ("no", " ".join(f"[{ranks}][{name}]" for ranks, name in links)), feature
        for ranks, name in links:
            assert {int(number) for number in ranks.split(",")} == numbers[name], (feature, name)
    assert targets.keys() == set(re.findall(r"\]\[([\w-]+)\]", text))  # all are used


def test_everything_public_is_in_the_docs() -> None:
    text = "".join(map(text_of, PAGES))
    for name in zeroone.__all__:
        assert re.search(rf"`zeroone\.{name}\b", text), name


def test_the_table_of_runs_is_what_the_definition_gives() -> None:
    """docs/advice.md, settings by length of run: the recipe's learning rates, and its defaults."""
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        closed_form = importlib.import_module("closed_form")
    finally:
        sys.path.pop(0)
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$",
        text_of(ROOT / "docs" / "advice.md"),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for row in rows:
        steps, kappa, until, refreshes, syncs = map(int, row[:-1])
        warm = steps // 10
        rates = [
            (t + 1) / warm
            if t < warm
            else 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warm) / (steps - warm)))
            for t in range(steps)
        ]
        found = closed_form.zero_one_adam(rates, kappa, until, 16)
        assert (len(found.refreshes), len(found.syncs)) == (refreshes, syncs)
        assert f"{(32 * refreshes + syncs) / steps:.2f}" == row[-1]
