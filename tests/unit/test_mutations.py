"""The stored mistakes of tests/mutations apply to this source; `make verify` makes them and runs their tests."""

from mutations.mistakes import MISTAKES, problem


def test_every_mistake_applies_and_has_a_test() -> None:
    assert [(mistake.name, reason) for mistake in MISTAKES if (reason := problem(mistake))] == []


def test_mistakes_are_different_and_change_something() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 34
    assert len({(mistake.file, mistake.old, mistake.new) for mistake in MISTAKES}) == len(MISTAKES)
    assert all(mistake.old != mistake.new and mistake.test for mistake in MISTAKES)


def test_a_record_that_no_longer_applies_is_named() -> None:
    first = MISTAKES[0]
    assert "occurs 0 times" in problem(first._replace(old="no such text"))
    assert "there is no test" in problem(first._replace(test="unit/test_training.py::test_of_nothing"))
