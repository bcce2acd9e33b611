import functools
import gzip
import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.gates.rules import rule_set
from knowgate.gates.rules.rule_set import PatternTimeBudget, load_rules
from knowgate.models.prompts.questions import is_follow_up
from tests.support.params import also_slow

BENCH = os.environ.get("KNOWGATE_BENCH")
SETS = (  # nothing in them is chat
    "nq_open", "hotpotqa_ctx", "webqa_zh_ctx", "cmrc2018_ctx", also_slow("triviaqa"), also_slow("squad_ctx"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("Hi", "greeting"),
        ("Hello there!", "greeting"),
        ("Good morning, everyone.", "greeting"),
        ("How are you today?", "greeting"),
        ("帮我把这段话改得更礼貌：请马上回复我的上一封邮件", "rewriting"),
        ("你好！", "greeting"),
        ("Thanks!", "thanks"),
        ("OK, thank you so much", "thanks"),
        ("谢谢您的帮助", "thanks"),
        ("Bye!", "farewell"),
        ("再见", "farewell"),
        ("Got it.", "assent"),
        ("好的，", "assent"),
        ("What is 2 + 2?", "arithmetic"),
        ("What's 1,200 divided by 12?", "arithmetic"),
        ("3加5等于几？", "arithmetic"),
        ("Rewrite this politely: send me the report by tomorrow or else.", "rewriting"),
        ("请润色下面这段话：我们的产品很好用大家都喜欢它。", "rewriting"),
        ("Translate into French:\nThe cat sat on the mat and slept.", "rewriting"),
        ("Translate: good day", "rewriting"),
        ("Please translate into German: where is the station", "rewriting"),
        ('Translate "good day" into French.', "rewriting"),
        ("翻译：你好", "rewriting"),
        ("请把“早上好”翻译成英文", "rewriting"),
        ("Bye, thanks", "farewell"),
        ("Hi! How are you?", "greeting"),
        ("OK, got it. Thanks, bye!", "assent"),
        ("谢谢，再见！", "thanks"),
        ("What does our policy say? Please cite it.", "sources wanted"),
        ("According to the employee handbook, when is lunch?", "sources wanted"),
        ("根据员工手册，年假有几天？", "sources wanted"),
        ("Who is the latest winner of the Booker prize?", "fresh events"),
        ("Who will host the Olympics next year?", "fresh events"),
        ("What is the weather like tomorrow?", "fresh events"),
        ("Did the company make a profit last year?", "fresh events"),
        ("This year, who won the cup?", "fresh events"),
        ("Who is the current governor of Maine?", "fresh events"),
        ("今天天气怎么样？", "fresh events"),
        ("明年的世界杯在哪里举行？", "fresh events"),
        ("目前公司有多少员工？", "fresh events"),
    ],
)
def test_the_packaged_rules_recognize_small_talk(said, rule):
    ruling = load_rules().decide(said)
    assert (ruling.rule if ruling else None) == rule


@pytest.mark.parametrize(
    "asked",
    [
        "Who wrote Romeo and Juliet?",
        "Who sang Hello?",
        "What does 'good morning' mean in Swedish?",
        "What is 24?",
        "In which year was the 8086 released?",
        "Who translated the Iliad into English?",
        "How do I fix a flat tyre?",
        "Which band released the album Thanks for the Memory?",
        "What is the yield of 3 x 5 m plots of maize?",
        "Thanks for the help, but what is the mascot's name?",
        "Hi, where is the canteen?",
        "鲁迅的原名是什么？",
        "Can I carry leave over into next year?",
        "My contract ends next year, how much notice must I give?",
        "I joined last year. How many days of leave do I get?",
        "I was ill yesterday; to whom do I send the note?",
        "How much did prices rise in the last year of the war?",
        "What happened in the next year of his reign?",
        "What is the current through a resistor of 5 ohms?",
        "What is the source of the Nile?",
        "Last week, Paul ate 2 cookies each day for 5 days. How many cookies did he eat?",
        "Thanks, where is the canteen?",
        "Bye the way, who wrote Emma?",
        "年假可以结转到明年吗？",
        "我去年入职，年假有几天？",
        "新闻学的研究对象是什么？",
        "根据合同法的规定，合同成立的时间是",
        "谢谢，食堂在哪里？",
    ],
)
def test_questions_are_left_to_the_gate(asked):
    assert load_rules().decide(asked) is None


@functools.cache
def _rulings(name):
    """Return every question of a set with the decision of the rules."""
    with gzip.open(Path(str(BENCH)) / name / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [(text, load_rules().decide(text)) for text in (json.loads(line)["question"] for line in lines)]


@pytest.mark.skipif(BENCH is None, reason="KNOWGATE_BENCH is not set")
@pytest.mark.parametrize("name", SETS)
def test_rules_skip_at_most_one_real_question_in_a_thousand(name):
    rulings = _rulings(name)
    skipped = [text for text, ruling in rulings if ruling and not ruling.retrieve]
    assert len(skipped) <= len(rulings) / 1_000, skipped[:5]


@pytest.mark.skipif(BENCH is None, reason="KNOWGATE_BENCH is not set")
@pytest.mark.parametrize("name", [*SETS, "cmmlu", also_slow("mmlu")])
def test_few_timeless_questions_are_taken_for_recent_news(name):
    rulings = _rulings(name)
    fresh = [text for text, ruling in rulings if ruling and ruling.rule == "fresh events"]
    assert len(fresh) <= 16 * len(rulings) / 1_000, fresh[:5]  # on the Web, people do ask what is new: 1.5 % of nq_open


@pytest.mark.skipif(BENCH is None, reason="KNOWGATE_BENCH is not set")
def test_questions_taken_for_recent_news_are_so_by_the_uar_labels():
    with gzip.open(Path(str(BENCH)) / "uar_gate_time" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    found = [row["meta"]["need_retrieval_by_criterion"] for row in rows if _is_fresh(row["question"])]
    assert len(found) > 200
    assert sum(found) / len(found) > 0.98


def _is_fresh(question):
    ruling = load_rules().decide(question)
    return ruling is not None and ruling.rule == "fresh events"


def written(folder, text):
    file = folder / "rules.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_users_rules_come_first(tmp_path):
    file = written(tmp_path, '[[rule]]\nname = "our hello"\naction = "retrieve"\nwords = ["hello"]\n')
    assert load_rules(file).decide("Hello!").rule == "our hello"
    assert load_rules(file).decide("Thanks!").rule == "thanks"


def test_words_match_whole_words_only(tmp_path):
    file = written(tmp_path, '[[rule]]\nname = "ours"\naction = "retrieve"\nwords = ["Acme 3", "C++", "星云"]\n')
    rules = load_rules(file)
    for text in ("is ACME 3 good?", "Acme 3的價格", "learn C++ now", "星云手机好吗"):
        assert rules.decide(text).rule == "ours"
    for text in ("Acme 3ville", "MacAcme 3", "Acme 30", "Acme 3_a", "ÉAcme 3"):
        assert rules.decide(text) is None


def test_years_after_the_cutoff_are_retrieved_for(tmp_path):
    rules = load_rules(written(tmp_path, "cut_off = 2023\n"))
    assert rules.decide("Who won the cup in 2024?").rule == "after the cut-off"
    assert rules.decide("Who won the cup in 2023?") is None
    assert rules.decide("How long is 2,024 m?") is None


def test_the_packaged_rules_can_be_left_out(tmp_path):
    assert load_rules(written(tmp_path, "packaged = false\n")).decide("Hi") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[rule]]\nname = "x"\naction = "search"\nwords = ["a"]\n', "action is 'search'"),
        ('[[rule]]\nname = "x"\naction = "skip"\n', "has no patterns"),
        ('[[rule]]\nname = "x"\naction = "skip"\npatterns = ["("]\n', "invalid regular expression"),
        ("[[rule]]\nname = 'x'\naction = 'skip'\npatterns = ['(a+)+$']\n", "a repetition inside a repetition"),
        ("[[rule]]\nname = 'x'\naction = 'skip'\npatterns = ['(?:\\w*)*!']\n", "a repetition inside a repetition"),
        ('[[rule]]\nname = "x"\naction = "skip"\nwords = ["a"]\nwhen = 1\n', "when"),
        ("cut_off = 23\n", "between 1900 and 2099"),
        ("rule = ", "rules.toml"),
    ],
)
def test_an_invalid_rules_file_is_rejected(tmp_path, text, words):
    with pytest.raises(BadSetting, match=words):
        load_rules(written(tmp_path, text))


def test_a_missing_rules_file_is_reported(tmp_path):
    with pytest.raises(BadSetting, match="cannot read the rules"):
        load_rules(tmp_path / "none.toml")


HOSTILE_PIECES = [
    "\n",
    " ",
    ",",
    "a ",
    "a\n",
    "?",
    "!a",
    "1+",
    "1,",
    "who ",
    "is ",
    "\nis ",
    "translate ",
    "which a ",
    "谁",
    "今天",
    "今天谁",
    "according to the ",
    "'",
]


def _seconds(work, text):
    """Return the processor time of a call, which other processes disturb little."""
    start = time.thread_time()
    work(text)
    return time.thread_time() - start


def _is_linear(work, frame, piece):
    """Eight times the text takes eight times as long. A quadratic pattern would take 64 times as long."""
    small, large = (frame.format(piece * (size // len(piece))) for size in (12_500, 100_000))
    return _seconds(work, large) < max(0.02, 24 * _seconds(work, small))


@pytest.mark.parametrize("piece", HOSTILE_PIECES, ids=ascii)
def test_packaged_patterns_take_linear_time(piece, monkeypatch):
    monkeypatch.setattr(rule_set, "PACKAGED_RULE_CHARS", 10**9)  # no cut: the patterns read the whole text
    works = {rule.name: partial(rule.matches, budget=PatternTimeBudget()) for rule in load_rules().rules} | {
        "follow-up": is_follow_up
    }
    for name, work in works.items():
        for frame in ("{}x", "a{}x"):
            assert any(_is_linear(work, frame, piece) for _ in range(3)), (name, frame)


@pytest.mark.parametrize("word", ["who ", "which ", "what "])
def test_a_text_of_words_that_ask_takes_as_long_as_any_other(word):
    def measure(text):
        start = time.thread_time()
        load_rules().decide(text)
        return time.thread_time() - start

    seconds = min(measure(word * (4_000 // len(word))) for _ in range(5))
    assert seconds < 5 * min(measure("xyz " * 1_000) for _ in range(5))


def test_a_slow_pattern_of_the_user_is_skipped_in_time(tmp_path, caplog):
    text = "[[rule]]\nname = 'slow'\naction = 'skip'\npatterns = ['(a|aa|b)+$', '(x|xx)+$']\n"
    rules = load_rules(written(tmp_path, text))
    start = time.perf_counter()
    assert rules.decide("cite " + "a" * 3_000 + "!").rule == "sources wanted"
    assert time.perf_counter() - start < 2
    assert "rule 'slow' was skipped" in caplog.text
    assert rules.decide("aaab").rule == "slow"


def test_slow_patterns_have_one_time_limit_for_a_list_of_questions(tmp_path):
    text = "[[rule]]\nname = 'slow'\naction = 'skip'\npatterns = ['(a|aa|b)+$', '(x|xx)+$']\n"
    rules = load_rules(written(tmp_path, text))
    shared_budget = PatternTimeBudget(0.1)
    start = time.perf_counter()
    matches = [rules.decide("a" * 3_000 + "!", shared_budget) for _ in range(100)]
    assert time.perf_counter() - start < 3  # without the limit for the list, at least 100 times 50 ms
    assert matches == [None] * 100
    assert rules.decide("aaab", shared_budget).rule == "slow"  # a pattern that matches at once is not slow


def test_packaged_rules_read_both_ends_of_a_long_text():
    filler = "A word. " * 300
    rules = load_rules()
    assert rules.decide(f"Please cite. {filler}").rule == "sources wanted"
    assert rules.decide(f"{filler} Please cite.").rule == "sources wanted"
    assert rules.decide(f"{filler[:1_200]} Please cite. {filler[:1_200]}") is None


def test_long_texts_are_decided_quickly():
    assert load_rules().decide("a " * 200_000) is None
    assert load_rules().decide("1 + " * 100_000) is None
    assert load_rules().decide("translate " * 10_000) is None
