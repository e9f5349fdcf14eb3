"""Weights of text sources: the texts, draws by weights, models that are trained together, and a tiny run with its tables."""

import argparse
import itertools

import pytest
import torch
from meha_lab.benchmarks import domain_texts, domain_weights
from meha_lab.benchmarks.domain_texts import SOURCES
from meha_lab.benchmarks.domain_weights import LENGTH, SIZES, TextPool, Texts
from meha_lab.store import Store
from torch.func import functional_call

KIB = 32


@pytest.fixture(scope="module")
def sources():
    return domain_texts.sources(KIB)


def test_sources_are_text_of_their_sizes(sources):
    for name, text in sources.items():
        assert len(text) == SOURCES[name] * KIB
        assert 0 <= int(text.min()) <= int(text.max()) < 128
    words = {name: bytes(text.tolist()).decode() for name, text in sources.items()}
    assert sorted(words["shuffled"]) == sorted(words["docstrings"])
    assert '"""' not in words["code"]
    assert "#" not in words["code"]
    assert words["numbers"].replace(" ", "").isdigit()
    assert domain_texts.checksum(sources.values()) == domain_texts.checksum(domain_texts.sources(KIB).values())


@pytest.mark.parametrize("name", domain_texts.TARGETS)
def test_no_line_of_a_target_is_in_another_part_or_in_a_source(name, sources):
    """Of the long ones, which no two texts share by chance."""
    target = domain_texts.target(name, 256)
    assert len(target.validation) == domain_texts.VALIDATION * 256
    texts = [bytes(part.tolist()).decode() for part in (*vars(target).values(), *sources.values())]
    lines = [{line.strip() for line in text.splitlines() if len(line.strip()) > 60} for text in texts]
    for (i, one), (_, other) in itertools.combinations(enumerate(lines), 2):
        if i < 3:
            assert len(one & other) < 0.02 * len(one)


def test_windows_are_drawn_by_weights_and_lie_within_their_texts():
    pool = TextPool([torch.full((LENGTH + 1 + 50 * i,), i) for i in range(4)], "cpu")
    weights = torch.tensor([[0.2, 0.0, 0.5, 0.3], [0.0, 1.0, 0.0, 0.0]])
    which, where = torch.rand(2, 20_000, generator=torch.Generator().manual_seed(0))
    source, windows = pool.draw(weights, which.repeat(2, 1), where.repeat(2, 1))
    assert torch.equal(windows, source[..., None].expand_as(windows))
    counts = torch.stack([(source == i).double().mean(dim=1) for i in range(4)], dim=1)
    assert torch.allclose(counts, weights.double(), atol=0.015)
    text = torch.arange(LENGTH + 3)
    ends = torch.tensor([0.0, 0.999_999_9])
    _, windows = TextPool([text], "cpu").draw(torch.ones(1), torch.zeros(2), ends)
    assert (int(windows[0, 0]), int(windows[1, -1])) == (0, LENGTH + 2)


def options(**other):
    return argparse.Namespace(**{"device": "cpu", "windows": 3, "eager": True, **other})


def test_models_that_are_trained_together_are_those_that_are_trained_alone(sources):
    texts = Texts.of(sources, domain_texts.target("docstrings", KIB), KIB, "cpu")
    weights = torch.eye(len(SOURCES) + 2)[[0, 8]]
    together = domain_weights.train(SIZES["tiny"], weights, texts, 5, 7, options())
    for row, found in zip(weights, together, strict=True):
        network = domain_weights.build(SIZES["tiny"], 7, "cpu")
        optimizer = torch.optim.AdamW(network.parameters(), lr=SIZES["tiny"].rate, weight_decay=domain_weights.DECAY)
        generator = torch.Generator().manual_seed(7)
        for step in range(5):
            optimizer.param_groups[0]["lr"] = SIZES["tiny"].rate * domain_weights.rate(step, 5)
            _, windows = texts.everything.draw(row, *torch.rand(2, 3, generator=generator))
            optimizer.zero_grad()
            domain_weights.losses(network, windows).mean().backward()
            optimizer.step()
        loss = float(domain_weights.losses(network, texts.held["test"]).mean().detach())
        assert found["test"][-1] == pytest.approx(loss, abs=1e-5)
    assert together[0]["test"][-1] != pytest.approx(together[1]["test"][-1], abs=1e-4)


def test_a_network_predicts_from_what_came_before():
    network = domain_weights.build(SIZES["tiny"], 0, "cpu")
    text = torch.randint(128, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[0, 70:] = 0
    assert torch.allclose(network(text)[0, :70], network(other)[0, :70], atol=1e-6)
    assert torch.equal(functional_call(network, dict(network.named_parameters()), (text,)), network(text))


def test_a_tiny_run_has_all_rows_and_resumes(tmp_path, capsys, monkeypatch):
    arguments = ["--measure", "--quick", "--out", str(tmp_path)]
    domain_weights.main(arguments)
    file = tmp_path / "domain_weights.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-7]))  # killed before the last trainings
    capsys.readouterr()
    domain_weights.main(arguments)
    assert "7 models" in capsys.readouterr().out
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(lines)
    monkeypatch.setattr(domain_weights, "CASES", domain_weights.QUICK)
    store = Store(tmp_path)
    table = domain_weights.table(store)
    rows = [line.split(" | ") for line in table]
    losses = {
        row[0].removeprefix("| "): float(row[2]) for row in rows if len(row) == 6 and row[1].strip().replace(".", "").isdigit()
    }
    alone = [losses[f"`{name}` alone"] for name in SOURCES]
    assert losses["best source alone"] in alone
    assert min(alone) <= losses["equal"] <= max(alone)
    assert any(row[0] == "| **found by the small model**" for row in rows)
    domain_weights.figure(store, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count("steps of the search") == 3


def test_a_case_without_the_search_of_its_teacher_is_refused(tmp_path):
    arguments = ["--measure", "--quick", "--case", "reference, tiny again", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="needs the search of 'reference, tiny' with seed 2"):
        domain_weights.main(arguments)
    with pytest.raises(SystemExit):
        domain_weights.main(arguments[:1] + arguments[2:])
