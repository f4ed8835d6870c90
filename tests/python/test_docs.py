"""Every sample and command in README and docs runs; what is made from the code is up to date.

C++ samples are extracted, built and run by tests/cpp/CMakeLists.txt.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKED_ELSEWHERE = {"", "cpp", "cmake"}  # formulas; tests/cpp/CMakeLists.txt; tests/cpp/consumer


def blocks(language: str) -> list[pytest.param]:
    return [
        pytest.param(text, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (found, text) in enumerate(BLOCK.findall(page.read_text()))
        if found == language
    ]


def test_no_block_is_of_a_language_that_nothing_runs() -> None:
    found = {language for page in PAGES for language, _ in BLOCK.findall(page.read_text())}
    assert found <= CHECKED_ELSEWHERE | {"python", "bash"}


@pytest.mark.parametrize("text", blocks("python"))
def test_python_sample(text: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(text)
    command = [sys.executable, "-W", "error", str(program)]
    torchrun = re.search(r"torchrun (.*) train\.py", text)
    if torchrun:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *torchrun[1].split(),
            str(program),
        ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    if "print(" in text:
        assert "bits per parameter and step" in result.stdout


@pytest.mark.parametrize("text", blocks("bash"))
def test_command(text: str) -> None:
    """`make X` names a target that make can plan; other commands are run as they are."""
    for line in text.splitlines():
        command = line.split("#")[0].strip()
        if command.startswith("make "):
            command = f"make --dry-run {command.removeprefix('make ')}"
        result = subprocess.run(
            command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        assert result.stdout, line


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            if "://" not in target:
                assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:src|tests|docs|recipes|examples|benchmarks)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_table_of_algorithms_is_that_of_the_registry() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "algorithms.md").read_text() == generate.algorithms()
