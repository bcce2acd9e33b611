"""The examples in the docstrings of the pipeline run."""

import doctest

from knowgate.pipeline import adaptive_rag


def test_the_examples_of_adaptive_rag_run():
    result = doctest.testmod(adaptive_rag)
    assert result.attempted > 10
    assert result.failed == 0
