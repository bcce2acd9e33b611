from knowgate.evaluation.report.reranker_report import build_reranker_verdict, write_reranker_page
from knowgate.evaluation.reranker_comparison import compare_rerankers
from tests.evaluation.test_reranker_comparison import ALIGNED, BOTH, ROWS, Table, answering, held, row
from tests.support.chromium import needs_browser, open_page


def many(n=40):
    """The second passage helps; the retriever puts it second, a good reranker first."""
    return [row(f"q{number}", {f"{number}a": -0.1, f"{number}b": 0.2, f"{number}c": -0.3}) for number in range(n)]


def good(rows):
    return Table(**{one.id: one.shift for row_ in rows for one in row_.candidates})


def test_a_reranker_that_ranks_better_is_worth_a_try_until_answers_show_it():
    verdict = build_reranker_verdict(compare_rerankers([held(many())], {"good": good(many())}))
    assert (verdict.level, verdict.best) == ("try", "good")
    assert "ranks a helpful passage first for 100.0 %, the retriever for 0.0 %: +100.0 points" in verdict.sentences[0]
    assert "name one in `model` to see whether answers improve" in verdict.sentences[1]


def test_a_reranker_that_ranks_no_better_is_not_recommended(tmp_path):
    verdict = build_reranker_verdict(compare_rerankers([held()], BOTH, answerers={"fake": answering(tmp_path)}))
    assert verdict.level == "leave"
    assert verdict.headline == "Leave the retriever's order as it is."
    assert "Answers of fake to nq with the top 1 passages" in " ".join(verdict.sentences)


def test_a_margin_whose_passages_no_llm_answered_with_is_not_the_best(tmp_path):
    answerers = {"fake": answering(tmp_path)}
    wrong = Table(**{passage.id: -passage.shift for row_ in ROWS for passage in row_.candidates})
    comparison = compare_rerankers([held()], {"wrong": wrong}, answerers=answerers, margin=0.5)
    means = next(iter(comparison.rankings.values())).measures.means["P@1"]
    assert means["wrong, margin 0.5"].value > means["wrong"].value
    assert build_reranker_verdict(comparison).best == "wrong"


def test_without_a_reranker_nothing_is_recommended():
    assert build_reranker_verdict(compare_rerankers([held()], {})).level == "unknown"


def test_controls_are_never_recommended():
    verdict = build_reranker_verdict(compare_rerankers([held()], {"aligned": ALIGNED}, controls=True))
    assert verdict.best == "aligned"


@needs_browser
def test_the_page_is_drawn_in_a_browser_without_console_lines(tmp_path):
    page = tmp_path / "report.html"
    write_reranker_page(compare_rerankers([held(many())], {"<b>good": good(many())}), page)
    opened = open_page(page, tmp_path / "profile")
    assert opened.console == []
    assert "Rankers: preferences by confidence, 40 questions" in opened.dom
    assert "<b>" not in opened.dom
