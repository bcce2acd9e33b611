"""Topics of labeled questions: where the LLM knows the answer, where passages help, and rules that follow from it.

Topics are clusters of question embeddings (spherical k-means), named by the words that are most frequent in a cluster
compared with the others (c-TF-IDF; Grootendorst 2022), or the values of a field of the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.display import TextTable, format_percent
from knowgate.core.options import Options, option
from knowgate.data.questions.records import find_field
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.offline_scoring import number_duplicates
from knowgate.gates.rules.topic_rule import RuleAction, TopicRule
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, load_embedder
from knowgate.retrieval.tokenizer import Tokenizer
from knowgate.stats.bootstrap import Estimate, estimate_mean
from knowgate.stats.metrics import BoolArray
from knowgate.stats.proportions import Proportion, estimate_proportion, format_percent_estimate, format_points_estimate
from knowgate.types import Embedder, Vector

AUTO_TOPICS = "auto"
TOPICS_HELP = (
    "Also show the results by topic: `auto` (clusters of question embeddings, named by their most telling words), a "
    "number of clusters, or a field of the data such as `dataset`."
)
MAX_TOPICS = 50
QUESTIONS_PER_TOPIC = 60  # the automatic number of topics is one per 60 questions
AUTO_RANGE = (2, 12)  # lowest and highest automatic number of topics
NAME_WORDS = 3
MIN_WORD_SHARE = 0.05  # a word names a topic only if at least this share of its questions contains it
RULE_QUESTIONS = 30  # questions that a topic needs before a rule is proposed for it
RULE_GAIN = 0.1  # a rule retrieves always if the interval of retrieval's gain in accuracy lies above this
RULE_ACCURACY = 0.1  # without answers with passages: if the interval of the closed-book accuracy lies below this
RULE_EXAMPLES = 20
K_MEANS_STARTS, K_MEANS_ROUNDS = 4, 50
# Words of many questions that say nothing about their topic.
_QUESTION_WORDS = (
    "who what when where which why how whom whose did do does has have had can could would should name named called "
    "many much from you your his her its he she i we my me one two first last new during been were after before most "
    "also other same than over under between about all more get take took made make come use used year day time type "
    "kind known located part people us again call out long place led"
)
QUESTION_WORDS = frozenset(_QUESTION_WORDS.split())


class TopicOptions(Options):
    """Options of a report by topic."""

    topics: str | None = option(None, TOPICS_HELP, metavar="auto|N|KEY")
    topic_rules: Path | None = option(
        None,
        "File to write suggested routing rules to, such as always retrieving for one topic. Read it and remove what "
        "you do not want; then use it as `rules`.",
        metavar="FILE",
    )


@dataclass(frozen=True)
class TopicResult:
    """How an LLM does on the questions of one topic.

    Attributes:
        name: The words that distinguish the topic most or, if topics are the values of a data field, that value.
        n: Number of questions.
        closed_book_accuracy: Share answered right without passages (closed-book).
        open_book_accuracy: Share answered right with passages (open-book); None if no question was answered with passages.
        benefit: `open_book_accuracy` minus `closed_book_accuracy`, with an interval.
        searches: Share of the questions that the policy retrieves for; None without a policy.
        examples: The most central questions; empty if topics are the values of a data field.
        min_similarity: A question belongs to the topic if its cosine similarity to the mean of the examples is at least
            this.
    """

    name: str
    n: int
    closed_book_accuracy: Proportion
    open_book_accuracy: Proportion | None
    benefit: Estimate | None
    searches: float | None
    examples: tuple[str, ...] = ()
    min_similarity: float = 0.0


def measure_topics(
    table: LabelTable,
    topics: str = AUTO_TOPICS,
    *,
    retrieve: BoolArray | None = None,
    resamples: int = 1_000,
    embedder: Embedder | None = None,
) -> list[TopicResult]:
    """Group the questions of a table into topics and measure each of them.

    Args:
        table: Labeled questions with their texts.
        topics: 'auto', a number of clusters, or a field of the data such as 'dataset' or 'meta.department'.
        retrieve: Whether a policy retrieves for each question; None for no policy.
        resamples: Bootstrap resamples for the intervals of the benefit.
        embedder: Embeds the questions. Default: the packaged model.

    Returns:
        The topics, the one with the most questions first.

    Raises:
        BadSetting: The number of topics is not between 2 and 50.
        BadInput: The rows hold no texts, or none has the field.
    """
    if topics != AUTO_TOPICS and not topics.isdigit():
        labels = _read_labels(table, topics)
        results = [_measure(table, str(name), labels == name, retrieve, resamples) for name in set(labels) - {""}]
        return sorted(results, key=lambda result: (-result.n, result.name))
    if not table.has_text.all():
        raise BadInput("the label run (recorded answers) has no texts to group by topic. Use the original run.")
    texts = [question.text for question in table.questions]
    vectors = (embedder or load_embedder(DEFAULT_EMBEDDER)).embed(texts)
    return measure_clusters(table, vectors, _choose_count(topics, len(texts)), retrieve=retrieve, resamples=resamples)


def measure_clusters(
    table: LabelTable, vectors: Vector, count: int, *, retrieve: BoolArray | None = None, resamples: int = 1_000
) -> list[TopicResult]:
    """Cluster questions by their embeddings, and measure what the LLM knows about each cluster.

    Args:
        table: The labeled questions.
        vectors: Embedding of each question.
        count: Number of clusters.
        retrieve: Whether a policy retrieves for each question; None for no policy.
        resamples: Bootstrap resamples for the intervals.
    """
    texts = [question.text for question in table.questions]
    assigned, centers = cluster_vectors(vectors, count)
    names = name_clusters(texts, assigned, len(centers))
    results = []
    for number, name in enumerate(names):
        rows = assigned == number
        central = _find_central(vectors, rows, centers[number])
        examples = tuple(texts[index] for index in central)
        min_similarity = _choose_min_similarity(vectors, rows, mean=vectors[central].mean(axis=0))
        result = _measure(table, name, rows, retrieve, resamples)
        results.append(replace(result, examples=examples, min_similarity=min_similarity))
    return sorted(results, key=lambda result: -result.n)


def _find_central(vectors: Vector, rows: BoolArray, center: Vector) -> NDArray[np.int64]:
    """Return the indices of the marked rows that are most similar to the center."""
    members = np.flatnonzero(rows)
    similarities = vectors[members] @ center
    return members[np.argsort(-similarities, kind="stable")][:RULE_EXAMPLES]


def _read_labels(table: LabelTable, key: str) -> NDArray[np.object_]:
    """Return a field of each question as text, "" for missing values."""
    name = key.removeprefix("meta.")
    values = [find_field(row.meta, name) for row in table.rows]
    if all(value is None for value in values):
        fields = sorted(table.rows[0].meta) if len(table.rows) else []
        raise BadInput(f"no question has the field '{key}'. Use one of these fields: {', '.join(fields) or 'none'}.")
    return np.array(["" if value is None else str(value) for value in values], dtype=object)


def _choose_count(topics: str, n: int) -> int:
    """Return the number of topics for n questions, by default one per 60 questions."""
    if topics == AUTO_TOPICS:
        return min(n, int(np.clip(n // QUESTIONS_PER_TOPIC, *AUTO_RANGE)))
    if not 2 <= int(topics) <= min(MAX_TOPICS, n):
        raise BadSetting(f"topics={topics} is not allowed. Use a number from 2 to {min(MAX_TOPICS, n)}, or 'auto'.")
    return int(topics)


def _measure(table: LabelTable, name: str, rows: BoolArray, retrieve: BoolArray | None, resamples: int) -> TopicResult:
    """Measure one topic; `rows` marks its questions."""
    closed_book_right = table.closed_book_right[rows]
    closed_book_accuracy = estimate_proportion(closed_book_right.tolist())
    open_book_accuracy = benefit = None  # both stay None if no answer used passages
    if table.open_book_right is not None:
        open_book_right = table.open_book_right[rows]
        open_book_accuracy = estimate_proportion(open_book_right.tolist())
        benefit = estimate_mean(open_book_right.astype(float) - closed_book_right, resamples)
    searches = None if retrieve is None else float(retrieve[rows].mean())
    return TopicResult(name, int(rows.sum()), closed_book_accuracy, open_book_accuracy, benefit, searches)


# --- clusters -------------------------------------------------------------------------------------


def cluster_vectors(vectors: Vector, count: int) -> tuple[NDArray[np.int64], Vector]:
    """Group unit vectors by spherical k-means, and keep the best of several random starts.

    Args:
        vectors: One unit vector per question.
        count: Number of clusters; empty ones are dropped.

    Returns:
        The number of the cluster of each vector, and the unit vector of each cluster.
    """
    rng = np.random.default_rng(0)
    runs = [_run_k_means(vectors, _choose_starts(vectors, count, rng)) for _ in range(K_MEANS_STARTS)]
    # The best run has the largest sum of cosine similarities between the vectors and their centers.
    similarities = [float((vectors * centers[assigned]).sum()) for assigned, centers in runs]
    assigned, centers = runs[int(np.argmax(similarities))]
    used, numbers = np.unique(assigned, return_inverse=True)  # drops empty clusters and numbers the others from 0
    return numbers.astype(np.int64), centers[used]


def _choose_starts(vectors: Vector, count: int, rng: np.random.Generator) -> Vector:
    """Choose starting centers far from each other (k-means++).

    Vectors far from the chosen centers are drawn more often.
    """
    chosen = [int(rng.integers(len(vectors)))]
    distances = np.ones(len(vectors))
    while len(chosen) < count:
        distances = np.minimum(distances, np.maximum(0, 1 - vectors @ vectors[chosen[-1]]))
        total = float(distances.sum())
        probabilities = distances / total if total > 0 else None  # None: all vectors are equal, so any will do
        chosen.append(int(rng.choice(len(vectors), p=probabilities)))
    return vectors[chosen]


def _run_k_means(vectors: Vector, centers: Vector) -> tuple[NDArray[np.int64], Vector]:
    """Run spherical k-means from starting centers until no vector changes its cluster.

    Returns:
        The number of the cluster of each vector, and the center of each cluster, a unit vector.
    """
    assigned = np.argmax(vectors @ centers.T, axis=1)
    for _ in range(K_MEANS_ROUNDS):
        sums = np.stack([vectors[assigned == number].sum(axis=0) for number in range(len(centers))])
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        centers = np.where(norms > 0, sums / np.maximum(norms, 1e-12), centers)  # an empty cluster keeps its center
        updated = np.argmax(vectors @ centers.T, axis=1)
        if (updated == assigned).all():
            break
        assigned = updated
    return assigned, centers


def name_clusters(texts: Sequence[str], assigned: NDArray[Any], count: int) -> list[str]:
    """Name each cluster by its most typical words (c-TF-IDF).

    Args:
        texts: The questions.
        assigned: Number of the cluster of each question.
        count: Number of clusters.
    """
    split = Tokenizer(stem=False)
    total_uses: Counter[str] = Counter()  # number of questions that contain each word
    cluster_uses: list[Counter[str]] = [Counter() for _ in range(count)]  # the same in each cluster
    for text, number in zip(texts, assigned, strict=True):
        words = {word for word in split(text) if word not in QUESTION_WORDS and len(word) > 1}
        total_uses.update(words)
        cluster_uses[number].update(words)
    names = []
    for number, uses in enumerate(cluster_uses):
        size = int((assigned == number).sum())
        rarities = {word: np.log(1 + len(texts) / total_uses[word]) for word in uses}
        names.append(_choose_name(uses, size, rarities))
    return number_duplicates(names)


def _choose_name(uses: Counter[str], size: int, rarities: Mapping[str, float]) -> str:
    """Join the words that are frequent in a cluster but rare elsewhere.

    Args:
        uses: Number of questions of the cluster that contain each word.
        size: Number of questions in the cluster.
        rarities: How rare each word is among all questions.
    """
    frequent = [word for word in uses if uses[word] >= max(2, MIN_WORD_SHARE * size)]
    weights = {word: uses[word] / size * rarities[word] for word in frequent}
    best = sorted(weights, key=lambda word: (-weights[word], word))[:NAME_WORDS]
    return ", ".join(best) or "other questions"


# --- tables and rules -----------------------------------------------------------------------------


def build_topic_table(topics: Sequence[TopicResult]) -> TextTable:
    """Build the table of topics, with the LLM's accuracy without and with passages."""
    has_open_book_answers = any(topic.open_book_accuracy for topic in topics)
    has_policy = any(topic.searches is not None for topic in topics)
    columns = ["topic", "n", "right from memory"]
    if has_open_book_answers:
        columns += ["right with passages", "change in points"]
    if has_policy:
        columns.append("searches of the policy")
    rows = []
    for topic in topics:
        cells = [topic.name, str(topic.n), format_percent_estimate(topic.closed_book_accuracy)]
        if topic.open_book_accuracy is not None and topic.benefit is not None:
            cells += [format_percent_estimate(topic.open_book_accuracy), format_points_estimate(topic.benefit)]
        if has_policy:
            cells.append(format_percent(topic.searches))
        rows.append(tuple(cells))
    return TextTable("By topic", tuple(columns), tuple(rows))


def describe_extremes(topics: Sequence[TopicResult]) -> str:
    """Name the topics the LLM knows best and worst."""
    most = max(topics, key=lambda topic: topic.closed_book_accuracy.value or 0.0)
    least = min(topics, key=lambda topic: topic.closed_book_accuracy.value or 0.0)
    shares = [f"{format_percent(topic.closed_book_accuracy.value)} about '{topic.name}'" for topic in (most, least)]
    return f"By topic, the LLM knows most ({shares[0]}) and least ({shares[1]})."


def propose_rules(topics: Sequence[TopicResult]) -> list[TopicRule]:
    """Propose rules to always or never retrieve for some topics.

    A rule is proposed only if a whole 95 % interval is beyond its limit.

    Args:
        topics: Measured topics. Those with fewer than 30 questions get no rule. Nor do topics that were taken from a field
            of the data, because a rule recognizes a topic by the embeddings of its example questions.

    Returns:
        Rules to always retrieve for topics on which passages gain more than 10 points of accuracy, and never for topics on
        which they lose. If there are no answers with passages, the only rules are to always retrieve, for topics of
        which the LLM knows less than 10 %.
    """
    rules = []
    for topic in topics:
        action = _choose_action(topic)
        if topic.examples and action is not None:
            rules.append(TopicRule(topic.name, action, topic.examples, topic.min_similarity, DEFAULT_EMBEDDER))
    return rules


def describe_rules(rules: Sequence[TopicRule]) -> str:
    """Describe proposed rules in a sentence; empty if there are none."""
    actions = {"retrieve": "always retrieve", "skip": "never retrieve"}
    proposals = "; ".join(f"{actions[rule.action]} for '{rule.name}'" for rule in rules)
    return f"Proposed rules: {proposals}. A rule costs one embedding per question." if rules else ""


def topics_to_dict(topics: Sequence[TopicResult]) -> list[dict[str, Any]]:
    """Convert topics to plain data, without the questions."""
    return [
        {
            "topic": topic.name,
            "questions": topic.n,
            "closed": asdict(topic.closed_book_accuracy),
            "open": asdict(topic.open_book_accuracy) if topic.open_book_accuracy else None,
            "benefit": asdict(topic.benefit) if topic.benefit else None,
            "searches": topic.searches,
        }
        for topic in topics
    ]


def _choose_action(topic: TopicResult) -> RuleAction | None:
    """Choose the action of a routing rule for a topic, or None for no rule. Whole 95 % intervals must pass the limits."""
    if topic.n < RULE_QUESTIONS:
        return None
    if topic.benefit is None:  # no answers with passages
        knows_little = topic.closed_book_accuracy.high is not None and topic.closed_book_accuracy.high < RULE_ACCURACY
        return "retrieve" if knows_little else None
    if topic.benefit.low is not None and topic.benefit.low > RULE_GAIN:
        return "retrieve"
    if topic.benefit.high is not None and topic.benefit.high < 0:
        return "skip"
    return None


def _choose_min_similarity(vectors: Vector, is_member: BoolArray, mean: Vector) -> float:
    """Choose the smallest similarity to a topic's examples with which a question counts as belonging to the topic.

    The limit is the one that best separates the topic's questions from all other questions.

    Args:
        vectors: Unit vector of each question.
        is_member: Whether each question belongs to the topic.
        mean: Mean vector of the topic's examples.

    Returns:
        The smallest cosine similarity to `mean`.
    """
    similarities = vectors @ (mean / max(float(np.linalg.norm(mean)), 1e-12))
    inside, outside = similarities[is_member], similarities[~is_member]
    candidates = np.quantile(inside, np.linspace(0, 0.5, 26))  # at least half of the topic's questions stay above it
    if not len(outside):
        return round(float(candidates[0]), 3)
    gaps = [(inside >= limit).mean() - (outside >= limit).mean() for limit in candidates]
    return round(float(candidates[int(np.argmax(gaps))]), 3)
