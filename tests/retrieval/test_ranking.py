import pytest

from knowgate.errors import BadSetting
from knowgate.retrieval.ranking import check_k


def test_a_search_asks_for_at_least_one_passage():
    check_k(1)
    with pytest.raises(BadSetting, match="k is 0; a search asks for at least 1 passage"):
        check_k(0)
