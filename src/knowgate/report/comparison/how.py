"""How a recommendation comes about, in words for a statistician."""

from __future__ import annotations

from knowgate.evaluation import CERTAIN, FEWEST, ROUNDS, WORTH

CHOOSING = (
    "A gate whose folder holds a guarantee that applies here (same LLM, wording, passages, answer length) is taken at "
    "its own threshold; of several, the one that skips most. Nothing is chosen by right and wrong, so all questions "
    "measure it.",
    "Else every gate is tried at every threshold, and doing without retrieval beside them. A skip wins where only the "
    "closed-book answer is right, and loses where only the open-book one is.",
    "A threshold will do if (wins - losses - 1) / n, less 1.645 standard errors, is above minus half of the loss that "
    "is accepted (--max-loss). Of those that will do, the one that skips most is taken.",
    f"To measure that choice, it is repeated {ROUNDS} times without a fifth of the questions and tried on that fifth. "
    "Difference, gain and their intervals (bootstrap over questions, paired) come from these held-out fifths; they are "
    "those of the way of choosing, and a little pessimistic for the choice made on all questions.",
    "The gain is against skipping as many searches at random: what a gate must beat to be worth anything.",
    f"'Worth using': the interval of the difference ends above minus the accepted loss, and the gain, with one loss "
    f"added, is more than {CERTAIN} standard errors above 0. (A bootstrap interval would not do: gains are rare, and a "
    "choice is behind them. With needs shuffled, so that no gate knew anything, 43 of 520 evaluations came out as worth "
    "using by such an interval, 6 by this.) 'Worth a try': the estimates are above, but that is not certain. 'Not worth it': the loss is "
    f"larger, or fewer than {100 * WORTH:g} % of the searches are skipped, or the gain is not above 0, or answers are "
    f"lost for certain and the gain might be 0. With fewer than {FEWEST} different questions nothing is said.",
)
