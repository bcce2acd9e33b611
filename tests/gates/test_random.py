import hashlib

import pytest

from knowgate.errors import BadSetting
from knowgate.gates.baselines import RandomGate
from knowgate.types import Question, Reading

MANY = [Question(f"question {i}", id=str(i)) for i in range(2000)]


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


def test_a_question_has_the_same_need_wherever_it_stands():
    assert needs(RandomGate(), MANY[::-1]) == needs(RandomGate())[::-1]


def test_another_seed_gives_other_needs():
    assert needs(RandomGate(seed=1)) != needs(RandomGate(seed=2))


def test_equal_texts_with_other_ids_are_drawn_apart():
    one, two = needs(RandomGate(), [Question("Who?", id="1"), Question("Who?", id="2")])
    assert one != two


def test_half_a_surrogate_pair_can_be_scored():
    assert 0 < needs(RandomGate(), [Question("half \ud800")])[0] < 1


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(BadSetting, match=r"rate is .* between 0 and 1"):
        RandomGate(rate=rate)
