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
    "'Worth using': the interval of the difference ends above minus the accepted loss, and the gain, with one loss "
    f"added, is more than {CERTAIN} standard errors above 0. 'Worth a try': the estimates are above, but that is not "
    f"certain. 'Not worth it': the loss is larger, or fewer than {100 * WORTH:g} % of the searches are skipped, or the "
    "gain is not above 0, or answers are lost for certain and the gain might be 0. With fewer than "
    f"{FEWEST} different questions nothing is said.",
    "How often that is luck: with needs shuffled, so that no gate knew anything, 3 of 400 evaluations came out worth "
    "using and 108 as worth a try, so the latter is a hint and no more. A bootstrap interval of the gain above 0 would "
    "have let 32 through. The cutoff was picked on shuffles of four recorded runs, from three that were tried; these "
    "figures are of four other runs.",
)
