"""What trains artefacts: gates from label runs, rerankers from preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.fitting.adaptive import fit_adaptive
    from knowgate.fitting.arbiters.fit_arbiter import arbiter_fit, fit_arbiter
    from knowgate.fitting.card import majority
    from knowgate.fitting.examples import FEWEST_GRADED, FEWEST_OF_A_KIND, Examples, load_examples, says_the_same
    from knowgate.fitting.fit_gate import fit, fit_function, fit_names
    from knowgate.fitting.fit_options import HANDED, FitFunction, FitOption, Wanted, options_of, wanted_by
    from knowgate.fitting.fit_result import FitResult
    from knowgate.fitting.fusion import fit_fusion
    from knowgate.fitting.judges.export import ExportedJudge, export_judge
    from knowgate.fitting.judges.ik import fewer, fit_ik, fit_ik_text
    from knowgate.fitting.judges.kbm import fit_kbm
    from knowgate.fitting.probability import fit_calibration
    from knowgate.fitting.probe import fit_probe
    from knowgate.fitting.reranker.alignment import RELEVANCE, AlignedReranker, fit_relevance, fit_reranker
    from knowgate.fitting.reranker.base import MINILM
    from knowgate.fitting.reranker.relevance import relevance_groups
    from knowgate.fitting.reranker.save import RELEVANCE_MANIFEST, gains_of, save_relevance, save_reranker
    from knowgate.fitting.reranker.training import Group, RerankStep, RerankTraining
    from knowgate.fitting.save import FitReport, save_fitted
    from knowgate.fitting.steps import FitStep, PlainStep, WatchFit
    from knowgate.fitting.uar import fit_uar
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "AlignedReranker",
    "Examples",
    "ExportedJudge",
    "FEWEST_GRADED",
    "FEWEST_OF_A_KIND",
    "FitFunction",
    "FitOption",
    "FitReport",
    "FitResult",
    "FitStep",
    "Group",
    "HANDED",
    "MINILM",
    "PlainStep",
    "RELEVANCE",
    "RELEVANCE_MANIFEST",
    "RerankStep",
    "RerankTraining",
    "Wanted",
    "WatchFit",
    "arbiter_fit",
    "export_judge",
    "fewer",
    "fit",
    "fit_adaptive",
    "fit_arbiter",
    "fit_calibration",
    "fit_function",
    "fit_fusion",
    "fit_ik",
    "fit_ik_text",
    "fit_kbm",
    "fit_names",
    "fit_probe",
    "fit_relevance",
    "fit_reranker",
    "fit_uar",
    "gains_of",
    "load_examples",
    "majority",
    "options_of",
    "relevance_groups",
    "save_fitted",
    "save_relevance",
    "save_reranker",
    "says_the_same",
    "wanted_by",
]
