"""The recipes: their text, their closed form, and the whole program on a tiny model."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import closed_form  # noqa: E402
import corpus  # noqa: E402

GOLDEN_REFRESHES = [*range(1, 17), *range(17, 49, 2), *range(49, 113, 4), 113, 121]  # kappa 16


def sentences(count: int, seed: int = 0) -> list[str]:
    """Documents of a language that is easy to learn."""
    chance = random.Random(seed)
    words = ["the", "rank", "sends", "one", "bit", "and", "waits", "for", "its", "peers"]
    return [" ".join(chance.choices(words, k=chance.randint(20, 60))) for _ in range(count)]


def test_split_depends_on_each_document_alone():
    documents = sentences(2000)
    train, validation = corpus.split(documents)
    assert not set(train) & set(validation)
    assert sorted([*train, *validation]) == sorted(set(documents))
    assert 0.03 < len(validation) / len(documents) < 0.07

    again = corpus.split([*sentences(500, seed=1), "", "  ", *documents, *documents])
    assert set(train) <= set(again[0])
    assert set(validation) <= set(again[1])
    assert len(again[0]) + len(again[1]) == len(set(documents) | set(sentences(500, seed=1)))


def test_corpus_is_built_once_for_the_same_text(tmp_path):
    first = corpus.build(sentences(300), tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = corpus.build(sentences(300), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    assert second.digest == first.digest
    assert (second.train == first.train).all()
    assert max(first.train.max(), first.validation.max()) < first.vocabulary <= corpus.VOCABULARY
    assert corpus.build(sentences(301), tmp_path).digest != first.digest


def test_validation_text_is_tokenized_without_loss(tmp_path):
    from tokenizers import Tokenizer

    documents = [f"{text} \N{SNOWMAN}\r\n\t" for text in sentences(300)]
    built = corpus.build(documents, tmp_path)
    saved = json.loads((tmp_path / f"{built.digest}.json").read_text())
    tokenizer = Tokenizer.from_str(json.dumps(saved["tokenizer"]))
    text = tokenizer.decode(built.validation.tolist(), skip_special_tokens=False)
    assert text.split(corpus.END_OF_DOCUMENT) == [*corpus.split(documents)[1], ""]


def test_folder_is_read_in_order_and_long_files_are_cut(tmp_path):
    paragraph = "word " * 100
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "long.txt").write_text("\n\n".join([paragraph] * 50))
    (tmp_path / "a.md").write_text("short")
    (tmp_path / "c.bin").write_bytes(b"\0")
    documents = corpus.read_folder(tmp_path)
    assert documents[0].strip() == "short"
    assert len(documents) > 3
    assert max(map(len, documents)) <= corpus.LONGEST_DOCUMENT + 2
    assert "".join(documents[1:]).split() == ["word"] * 5000


def test_sources_without_text_are_refused(tmp_path):
    with pytest.raises(corpus.CorpusError, match="not a folder"):
        corpus.read_folder(tmp_path / "absent")
    with pytest.raises(corpus.CorpusError, match=r"no \*\.txt, \*\.md, \*\.py files"):
        corpus.read_folder(tmp_path)
    with pytest.raises(corpus.CorpusError, match="too small: 0 documents"):
        corpus.build(["", "\n"], tmp_path)


def test_python_ships_enough_documentation():
    documents = corpus.read_python_docs()
    assert sum(map(len, documents)) > 1_500_000
    assert any("with statement" in text for text in documents)


def test_refreshes_are_the_golden_list():
    rounds = closed_form.zero_one_adam([1.0] * 128, kappa=16, until=128, max_interval=16)
    assert rounds.refreshes == GOLDEN_REFRESHES
    assert rounds.syncs == [step for step in range(1, 129) if step not in GOLDEN_REFRESHES]

    frozen = closed_form.zero_one_adam([1.0] * 128, kappa=16, until=20, max_interval=16)
    assert frozen.refreshes == [*range(1, 18), 19]


def test_syncs_get_rarer_as_the_learning_rate_falls():
    rates = [0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 1.0, 1.0, 0.1, 0.1]
    rounds = closed_form.zero_one_adam(rates, kappa=1, until=1, max_interval=16)
    # 0.5 at step 4: interval 2; 0.5 at 6: 2; 0.25 at 8: 4; risen at 12: 1; 0.1 at 14: 8; close: 15
    assert rounds == closed_form.Rounds([1], [2, 3, 4, 6, 8, 12, 13, 14, 15])

    still = closed_form.zero_one_adam([1.0, 0.0, 0.0, 1.0], kappa=1, until=1, max_interval=16)
    assert still == closed_form.Rounds([1], [4])  # nothing to send while the learning rate is 0


def test_refresh_waits_for_pending_steps():
    rates = [1.0, 1.0, *[0.25] * 10]
    rounds = closed_form.zero_one_adam(rates, kappa=2, until=12, max_interval=4)
    # refreshes 1, 2, 3 as due; the next is due at 5, inside the interval 4 to 7, and follows it
    assert rounds == closed_form.Rounds([1, 2, 3, 8], [7, 12])


def test_bytes_of_a_round():
    numels = [5, 3, 0, 10]  # L = 16: three tensors lie in the first chunk, one in the second
    dense, one_bit = 40 + 4 * 16, 40 + 16 // 8 + 4 * 3
    assert closed_form.bytes_sent(closed_form.adamw(3), numels, 2) == 2 * 3 * dense
    rounds = closed_form.one_bit_adam(5, warmup_steps=2)
    assert closed_form.bytes_sent(rounds, numels, 2) == 2 * (2 * dense + 3 * one_bit)
    assert closed_form.bytes_sent(rounds, numels, 1) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_pretraining_a_tiny_model(tmp_path, ranks):
    steps = 24
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text("\n\n".join(sentences(3000)))
    options = (
        f"--layers 1 --width 32 --heads 2 --context 16 --batch-size 4 --steps {steps} --lr 0.01 "
        f"--clip 1 --kappa 2 --evaluate-every 10 --optimizer all --corpus {tmp_path / 'text'} "
        f"--cache {tmp_path / 'cache'} --output {tmp_path / 'out'}"
    )
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
    done = subprocess.run(
        [
            sys.executable,
            *(launcher.split() if ranks > 1 else []),
            str(RECIPES / "pretrain_gpt.py"),
            *options.split(),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["world_size"] == ranks
    assert [run["optimizer"] for run in results["runs"]] == [
        "adamw",
        "one-bit-adam",
        "zero-one-adam",
    ]
    for run in results["runs"]:
        assert run["as_closed_form"], (run["stats"], run["expected"])
        assert run["stats"]["steps"] == steps
        assert len(run["train_loss"]) == steps
        assert all(map(math.isfinite, run["train_loss"]))
        assert [point["step"] for point in run["evaluations"]] == [0, 10, 20, 24]
        assert run["final_loss"] < run["evaluations"][0]["loss"] - 0.1
        assert run["train_loss"][0] == results["runs"][0]["train_loss"][0]
    dense, one_bit, zero_one = (run["stats"]["bytes_sent"] for run in results["runs"])
    assert dense > one_bit > zero_one if ranks > 1 else dense == zero_one == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert table in done.stdout
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
