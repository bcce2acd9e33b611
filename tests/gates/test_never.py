from knowgate.gates.baselines import NeverGate
from knowgate.types import Question, Reading


def test_need_is_zero_which_is_not_above_the_threshold():
    assert NeverGate().score([Question("Hi"), Question("谁?")], [Reading(), Reading()]) == [0.0, 0.0]
    assert NeverGate().threshold >= 0


def test_nothing_is_read():
    assert NeverGate().request.is_empty
