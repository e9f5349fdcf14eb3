"""The changes of ``mutants.txt``: each still fits the library, and the changed copy is what the tests run."""

import ast

import pytest
from meha_lab.mutants import TESTS, copied, failure, mutants
from meha_lab.paths import ROOT


def test_each_mutant_changes_one_place_of_a_file_that_still_parses():
    assert len(mutants()) == 40
    assert len({mutant.rule for mutant in mutants()}) == 40
    for mutant in mutants():
        text = (ROOT / "meha" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant
        ast.parse(text.replace(mutant.old, mutant.new))


def test_all_files_of_tests_exist():
    assert {mutant.tests for mutant in mutants()} == set(TESTS)
    for name in {name for names in TESTS.values() for name in names}:
        assert (ROOT / "tests" / name).is_file(), name


def test_text_that_is_not_there_is_refused_with_the_rule(tmp_path):
    mutant = mutants()[0]
    (tmp_path / "meha" / mutant.file).parent.mkdir(parents=True)
    for text, count in (("x = 1\n", 0), (f"{mutant.old}\n{mutant.old}\n", 2)):
        (tmp_path / "meha" / mutant.file).write_text(text)
        with pytest.raises(ValueError, match=f"{mutant.rule}.* is {count} times"):
            mutant.apply(tmp_path)


def test_a_copy_with_a_mutant_is_what_runs(tmp_path):
    (mutant,) = (mutant for mutant in mutants() if mutant.old == "DEVIATION = 0.05")
    test = "tests/lower/test_lower.py::test_powers_far_from_the_square_are_not_taken_for_quadratic"
    copy = copied(ROOT, tmp_path.resolve())
    assert failure(copy, [test], []) == ""
    mutant.apply(copy)
    assert failure(copy, [test], []) == f"{test}[1.5-False]"
    assert failure(copy, [test], [f"{test}[1.5-False]"]) == f"{test}[4.0-False]"
    assert "DEVIATION = 0.05" in (ROOT / "meha" / mutant.file).read_text()
