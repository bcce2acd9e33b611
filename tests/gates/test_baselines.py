"""The baselines: always, never and random."""

import hashlib

import pytest

from knowgate.errors import BadSetting
from knowgate.gates.baselines import AlwaysGate, NeverGate, RandomGate
from knowgate.types import Question, Reading

MANY = [Question(f"question {i}", id=str(i)) for i in range(2000)]


def test_always_has_need_one_above_its_threshold():
    assert AlwaysGate().score([Question("Hi"), Question("谁?")], [Reading(), Reading()]) == [1.0, 1.0]
    assert AlwaysGate().threshold < 1


def test_always_obeys_rules_only_on_request():
    assert not AlwaysGate().obeys_rules
    assert AlwaysGate("rules").obeys_rules


def test_never_has_need_zero_not_above_its_threshold():
    assert NeverGate().score([Question("Hi"), Question("谁?")], [Reading(), Reading()]) == [0.0, 0.0]
    assert NeverGate().threshold >= 0


@pytest.mark.parametrize("gate", [AlwaysGate(), NeverGate()])
def test_baselines_read_nothing(gate):
    assert gate.request.is_empty


def needs(gate, questions=MANY):
    return gate.score(questions, [Reading()] * len(questions))


def test_need_is_the_first_52_bits_of_a_hash_of_seed_id_and_text():
    digest = hashlib.sha256()
    for part in (b"3", b"q1", b"Who?"):
        digest.update(len(part).to_bytes(8, "big") + part)
    expected = (int(digest.hexdigest()[:13], 16) + 0.5) / 2**52
    assert needs(RandomGate(seed=3), [Question("Who?", id="q1")]) == [expected]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1.0])
def test_the_share_above_the_threshold_is_the_rate(rate):
    gate = RandomGate(rate=rate)
    share = sum(need > gate.threshold for need in needs(gate)) / len(MANY)
    assert share == pytest.approx(rate, abs=0.0 if rate in (0, 1) else 0.04)  # 4 % is over three standard deviations


def test_the_need_of_a_question_does_not_depend_on_its_position():
    assert needs(RandomGate(), MANY[::-1]) == needs(RandomGate())[::-1]


def test_another_seed_gives_other_needs():
    assert needs(RandomGate(seed=1)) != needs(RandomGate(seed=2))


def test_equal_texts_with_other_ids_have_other_needs():
    one, two = needs(RandomGate(), [Question("Who?", id="1"), Question("Who?", id="2")])
    assert one != two


def test_half_a_surrogate_pair_can_be_scored():
    assert 0 < needs(RandomGate(), [Question("half \ud800")])[0] < 1


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_rejected(rate):
    with pytest.raises(BadSetting, match=r"rate is .* between 0 and 1"):
        RandomGate(rate=rate)
