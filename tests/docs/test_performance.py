"""The figures of the page on performance are the ones that the runs wrote."""

import figures
import pytest


@pytest.mark.parametrize("name", figures.TABLES)
def test_the_figures_are_those_of_the_run(name: str):
    """Each table stands in the page as bench/results has it, so that no figure is written in by hand."""
    assert figures.marked(name).findall(figures.PAGE.read_text()) == [figures.table(name)]
