from knowgate.gates.baselines import AlwaysGate
from knowgate.types import Question, Reading


def test_need_is_one_which_is_above_the_threshold():
    assert AlwaysGate().score([Question("Hi"), Question("谁?")], [Reading(), Reading()]) == [1.0, 1.0]
    assert AlwaysGate().threshold < 1


def test_rules_come_first_only_where_it_is_told_so():
    assert not AlwaysGate().obeys_rules
    assert AlwaysGate("rules").obeys_rules


def test_nothing_is_read():
    assert AlwaysGate().request.is_empty
